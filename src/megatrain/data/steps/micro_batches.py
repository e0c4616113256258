"""Rows of documents as the tensors of a step.

Where a model attends to each document alone, the rows of a micro-batch, packed or not, are laid one
after the other as one flat row, whatever their lengths: there is no padding and no mask, and few
micro-batches are needed. Other models keep documents apart by position ids, which they read only
where there is no attention mask: then packed rows share a micro-batch only if equally long. Their
rows of one document each are padded on the right to the longest of their micro-batch; rows of like
length go together. The two answers of a row of preferences (answers.py) are neighbors in a flat or
packed row, or two padded ones.

Laws (tests/data/steps/test_micro_batches.py)
    1. Every token of every document is there once; labels are its trained tokens but the first.
    2. A micro-batch of a model that packs flat is one row, without padding.
    3. No micro-batch holds more than `micro_batch_tokens`, padding counted.
    4. Each document has its own media and types of tokens, wherever order and packing put it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.data.media.placed import DocumentMedia, media_of
from megatrain.data.steps.answers import PairedAnswers
from megatrain.data.steps.order import Indices
from megatrain.data.steps.packing import pack
from megatrain.data.tokens.documents import Documents, Lengths
from megatrain.losses.head import IGNORED
from megatrain.media import MediaItem

ReadItem = Callable[[str], MediaItem]
"""Returns media by their digests."""


class Beside(Protocol):
    """Facts about documents, besides their tokens."""

    def extra(self, documents: Indices, places: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return what a micro-batch of these documents, in this order, holds for the loss.

        `places`: the number of the document at each position, counted in the micro-batch.
        """


def micro_batches(
    rows: Sequence[Indices],
    documents: Documents,
    *,
    micro_batch_tokens: int,
    packing: bool,
    flat: bool,
    pad_id: int,
    beside: Beside | None = None,
    sources: Indices | None = None,
    items: ReadItem | None = None,
) -> list[MicroBatch]:
    """Return the rows of a step as micro-batches, longest rows first.

    `beside` has what the loss reads of documents besides their tokens: answers.py, teacher.py.
    `sources` has the number of each document's source, if micro-batches are to tell them apart.
    `items` returns media by their digests, of documents that have some.

    `flat`: rows of any lengths are one row, `isolation.packs_flat`. Else, without packing, the
    documents of a row, if they are several, are as many rows of one micro-batch.
    """
    lengths = [int(documents.lengths[row].sum()) for row in rows]
    if flat:
        laid = pack(lengths, micro_batch_tokens)
        one_row = [np.concatenate([rows[number] for number in group]) for group in laid]
        return [_packed([row], documents, beside, sources, items) for row in one_row]
    if not packing:
        widest = [int(documents.lengths[row].max()) for row in rows]
        groups = _groups(widest, micro_batch_tokens, height=len(rows[0]) if rows else 1)
        made = [[rows[number] for number in group] for group in groups]
        return [_padded(group, documents, pad_id, beside, sources, items) for group in made]
    groups = _groups(lengths, micro_batch_tokens, equal=True)
    made = [[rows[number] for number in group] for group in groups]
    return [_packed(group, documents, beside, sources, items) for group in made]


def laid_out(
    numbers: Indices,
    documents: Documents,
    *,
    one_row: bool,
    pad_id: int,
    items: ReadItem | None = None,
) -> MicroBatch:
    """Return these documents as one micro-batch, in their order: in one row, or a row for each.

    It says to which document each position belongs, as for answers.
    """
    if one_row:
        return _packed([numbers], documents, PairedAnswers(), items=items)
    return _padded([numbers], documents, pad_id, PairedAnswers(), items=items)


def _groups(
    lengths: Sequence[int], micro_batch_tokens: int, *, equal: bool = False, height: int = 1
) -> Iterator[list[int]]:
    """Yield what shares a micro-batch; each takes `height` of its rows."""
    group: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        width = lengths[group[0]] if group else 0
        full = (len(group) + 1) * height * width > micro_batch_tokens
        if group and (full or (equal and lengths[number] != width)):
            yield group
            group = []
        group.append(number)
    if group:
        yield group


def _document(documents: Documents, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return tokens and labels. The first token of a document is not a target."""
    tokens, trained = documents.tokens(number)
    ids = tokens.astype(np.int64)
    labels = np.where(trained, ids, IGNORED)
    labels[:1] = IGNORED
    return ids, labels


def _packed(
    rows: Sequence[Indices],
    documents: Documents,
    beside: Beside | None,
    sources: Indices | None = None,
    items: ReadItem | None = None,
) -> MicroBatch:
    ids, labels, positions = [], [], []
    for row in rows:
        parts = [_document(documents, int(number)) for number in row]
        ids.append(np.concatenate([part[0] for part in parts]))
        labels.append(np.concatenate([part[1] for part in parts]))
        positions.append(np.concatenate([np.arange(len(part[0])) for part in parts]))
    begins = torch.from_numpy(np.stack(positions)) == 0
    places = begins.view(-1).cumsum(0).view(begins.shape) - 1
    targets = torch.from_numpy(np.stack(labels))
    numbers = np.concatenate(rows)
    media = [media_of(documents, int(number)) for number in numbers]
    return MicroBatch(
        input_ids=torch.from_numpy(np.stack(ids)),
        labels=targets,
        position_ids=torch.from_numpy(np.stack(positions)),
        loss_tensors={} if beside is None else beside.extra(numbers, places, targets),
        source_ids=None if sources is None else torch.from_numpy(sources[numbers])[places],
        **_with_items(media, documents.lengths[numbers], targets.shape, items),
    )


def _padded(
    rows: Sequence[Indices],
    documents: Documents,
    pad_id: int,
    beside: Beside | None,
    sources: Indices | None = None,
    items: ReadItem | None = None,
) -> MicroBatch:
    numbers = np.concatenate(rows)
    media = [media_of(documents, int(number)) for number in numbers]
    parts = [_document(documents, int(number)) for number in numbers]
    shape = (len(parts), max(len(ids) for ids, _ in parts))
    input_ids = torch.full(shape, pad_id)
    labels = torch.full(shape, IGNORED)
    mask = torch.zeros(shape, dtype=torch.int64)
    for number, (ids, targets) in enumerate(parts):
        input_ids[number, : len(ids)] = torch.from_numpy(ids)
        labels[number, : len(ids)] = torch.from_numpy(targets)
        mask[number, : len(ids)] = 1
    no_padding = bool(mask.all())
    places = torch.arange(shape[0])[:, None].repeat(1, shape[1])
    return MicroBatch(
        input_ids=input_ids,
        labels=labels,
        attention_mask=None if no_padding else mask,
        loss_tensors={} if beside is None else beside.extra(numbers, places, labels),
        source_ids=None if sources is None else torch.from_numpy(sources[numbers])[places],
        **_with_items(media, documents.lengths[numbers], labels.shape, items),
    )


def _with_items(
    media: Sequence[DocumentMedia | None],
    lengths: Lengths,
    shape: Sequence[int],
    items: ReadItem | None,
) -> dict[str, Any]:
    """Return the media of documents, and the types of their tokens; nothing if none has any."""
    if all(one is None for one in media):
        return {}
    assert items is not None, "documents have media, which nothing reads"
    types = [
        np.zeros(length, dtype=np.uint8) if one is None else one.token_types
        for one, length in zip(media, lengths, strict=True)
    ]
    if len(types) == shape[0]:  # a row for each, perhaps with padding
        types = [np.pad(one, (0, shape[1] - len(one))) for one in types]
    return {
        "mm_token_type_ids": torch.from_numpy(np.concatenate(types).astype(np.int64)).view(*shape),
        "media": [[items(digest) for digest in one.digests] if one else [] for one in media],
    }
