"""Reference log-probabilities: one streamed pass over all documents before the first step.

The reference is the model as training starts: of adapters that is the base under new ones, and the
base with those that it starts from. So no second model is ever in memory. The result, one number
for each document, is kept in the cache beside the prepared data, under a key of the weights, the
documents and whatever changes the bits; a second run finds it. The run folder has a copy, because
a resumed run has other weights in memory and the cache may be gone.

Laws (tests/run/evaluation/test_references.py)
    1. The numbers are the log-probabilities of the resident model on the same rows, bit for bit.
    2. A second run and a resumed one compute nothing; other weights or documents do.
    3. Any number of ranks gives the same bits: each computes some micro-batches for all.
    4. A damaged file is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from megatrain import files
from megatrain.batch import MicroBatch
from megatrain.cache import writable_cache_folder
from megatrain.config import Config
from megatrain.data.media.placed import media_of
from megatrain.data.steps.micro_batches import ReadItem, laid_out
from megatrain.data.steps.order import Indices
from megatrain.data.tokens.documents import Documents
from megatrain.data.tokens.prepared import digest_of
from megatrain.data.training_rows import TrainingRows, one_of
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.errors import DataError
from megatrain.memory.kinds import TensorKind
from megatrain.memory.store import Store
from megatrain.models.isolation import packs_flat
from megatrain.planning.levers import CHANGE_FORWARD
from megatrain.progress import token_progress
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.step.settings import StepSettings

REFERENCES_FILE = "references.bin"
"""In a run folder."""
_MARK_BYTES = 32
CHANGE_BITS = (*CHANGE_FORWARD, "compile", "kernels", "products")
"""Step settings that change the last bits."""

References: TypeAlias = NDArray[np.float32]
"""Log-probability of each document, summed over its trained tokens. (documents,)"""


def with_references(
    config: Config,
    rows: TrainingRows,
    engine: Engine,
    home: HostModel,
    settings: StepSettings,
    run: Path,
    *,
    pad_id: int,
    resumes: bool,
    ranks: Ranks = ALONE,
    items: ReadItem | None = None,
) -> TrainingRows:
    """Return the rows with the log-probability of each answer under the reference model.

    `items` returns the media of rows. All ranks call it. Raises DataError if a run that `resumes`
    has lost them.
    """
    parts = (rows.train, *rows.held)
    documents = one_of(parts)
    known = documents_digest(documents)
    if resumes:
        found = _of_all(ranks, read_references(run / REFERENCES_FILE, known))
        if found is None:
            raise _missing(run)
    else:
        found = _cached(config, documents, known, engine, home, settings, ranks, pad_id, items)
        ranks.on_first(partial(write_references, run / REFERENCES_FILE, known, found))
    assert rows.answers is not None
    ends = np.cumsum([len(part.lengths) for part in parts])
    train, *held = np.split(found, ends[:-1])
    return replace(
        rows,
        answers=replace(rows.answers, references=train),
        held_answers=tuple(
            replace(answers, references=of_part)
            for answers, of_part in zip(rows.held_answers, held, strict=True)
        ),
    )


def _cached(
    config: Config,
    documents: Documents,
    known: str,
    engine: Engine,
    home: HostModel,
    settings: StepSettings,
    ranks: Ranks,
    pad_id: int,
    items: ReadItem | None,
) -> References:
    """Return the references from the cache, or compute and keep them there."""
    model, data, tokens = config.model, config.data, config.step_tokens
    flat = packs_flat(home.decoder, compiles=settings.compile)
    one_row = config.packs or flat
    facts = (
        torch.__version__,
        engine.device.name.partition(":")[0],
        home.decoder.config.to_json_string(use_diff=False),
        (model.dtype, model.attn, one_row, data.max_length),
        {name: getattr(settings, name) for name in CHANGE_BITS},
        *((home.decoder.adapters.lora,) if home.decoder.adapters is not None else ()),
    )
    key = digest_of([known, weights_digest(home.store, ranks), repr(facts)])
    path = writable_cache_folder() / f"references-{key}.bin"
    kept = read_references(path, known)
    if (found := _of_all(ranks, kept)) is not None:
        return found
    found = compute_references(
        engine,
        documents,
        ranks,
        micro_batch_tokens=data.max_length,
        pass_tokens=tokens or data.max_length,
        one_row=one_row,
        pad_id=pad_id,
        items=items,
    )
    if kept is None:
        write_references(path, known, found)
    return found


def _of_all(ranks: Ranks, found: References | None) -> References | None:
    """Return what was found, if all ranks have found it."""
    said = ranks.agree({"found": found is not None})
    return found if all(one["found"] for one in said) else None


def compute_references(
    engine: Engine,
    documents: Documents,
    ranks: Ranks,
    *,
    micro_batch_tokens: int,
    pass_tokens: int,
    one_row: bool,
    pad_id: int,
    items: ReadItem | None = None,
) -> References:
    """Return the log-probability of each document's trained tokens under the engine's model.

    `pass_tokens` go through the model at a time. All ranks call it; each computes its share.
    """
    result = np.zeros(len(documents.lengths), dtype=np.float32)
    groups = list(document_groups(documents, micro_batch_tokens, one_row=one_row))
    per_rank = max(1, pass_tokens // micro_batch_tokens // ranks.owner.size)
    owner, stride = ranks.owner, per_rank * ranks.owner.size
    total = int(documents.lengths.sum())
    with token_progress("reference log-probabilities", total, shown=ranks.leads) as advance:
        for first in range(0, len(groups), stride):
            now = groups[first : first + stride]
            own = now[owner.rank :: owner.size]
            # A rank without a share goes through the model too: all of them move its blocks.
            mine = own or now[:1]
            batch = [
                laid_out(docs, documents, one_row=one_row, pad_id=pad_id, items=items)
                for docs in mine
            ]
            logprobs = engine.logprobs(batch)
            sums = [document_sums(*found) for found in zip(batch, logprobs, strict=True)]
            said = ranks.agree({"sums": sums if own else []})
            for rank, of_rank in enumerate(said):
                for group, found in zip(now[rank :: owner.size], of_rank["sums"], strict=True):
                    result[group] = found
            advance(sum(int(documents.lengths[group].sum()) for group in now))
    return result


def document_groups(
    documents: Documents, micro_batch_tokens: int, *, one_row: bool
) -> Iterator[Indices]:
    """Yield the documents of each micro-batch: those of like length together, the longest first."""
    order = np.argsort(-documents.lengths, kind="stable")
    first, tokens = 0, 0
    for place, number in enumerate(order):
        length = int(documents.lengths[number])
        width = int(documents.lengths[order[first]])
        needed = tokens + length if one_row else (place - first + 1) * width
        if place > first and needed > micro_batch_tokens:
            yield order[first:place]
            first, needed = place, length
        tokens = needed if one_row else 0
    yield order[first:]


def document_sums(micro: MicroBatch, logprobs: torch.Tensor) -> list[float]:
    """Return the sum of each document's log-probabilities, rounded to fp32 once."""
    places = micro.loss_tensors["answers"].view(-1)
    sums = torch.zeros(len(micro.loss_tensors["lengths"]), dtype=torch.float64)
    return sums.index_add(0, places, logprobs.double().view(-1)).float().tolist()


def documents_digest(documents: Documents) -> str:
    """Return a digest of all tokens, of which are trained, and of media."""
    digest = xxhash.xxh3_128()
    for number in range(len(documents.lengths)):
        ids, trained = documents.tokens(number)
        digest.update(np.int64(len(ids)).tobytes())
        digest.update(np.ascontiguousarray(ids, dtype=np.int32).data)
        digest.update(np.packbits(trained).tobytes())
        if (media := media_of(documents, number)) is not None:
            digest.update("".join(media.digests).encode())
    return digest.hexdigest()


def weights_digest(store: Store, ranks: Ranks) -> str:
    """Return a digest of the weights that all ranks have."""
    digest = xxhash.xxh3_128(store.arena(TensorKind.HI).numpy().data)
    return digest_of([said["weights"] for said in ranks.agree({"weights": digest.hexdigest()})])


def read_references(path: Path, documents: str) -> References | None:
    """Return what was kept for these documents; None: nothing, or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    mark, numbers = data[:_MARK_BYTES], data[_MARK_BYTES:]
    if mark != _mark(documents, numbers):
        return None
    return np.frombuffer(numbers, dtype="<f4").astype(np.float32)


def write_references(path: Path, documents: str, references: References) -> None:
    """Keep references for `read_references`."""
    numbers = references.astype("<f4").tobytes()
    files.write_file(path, _mark(documents, numbers) + numbers)


def _mark(documents: str, numbers: bytes) -> bytes:
    return digest_of([documents, xxhash.xxh3_128_hexdigest(numbers)]).encode()


def _missing(folder: Path) -> DataError:
    return DataError(
        f"{folder / REFERENCES_FILE}: the reference log-probabilities of the run are missing or do "
        "not belong to its rows. They are of the model at the start, which is no longer in memory. "
        "Restore the file, or start a new run from the exported model with another save.dir: its "
        "reference is then that model."
    )
