"""The batch of a step: micro-batches, each a slice that the device processes at a time.

`data` makes them and the engine trains on them; where ranks share a step, each takes its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.errors import BatchError, listing
from megatrain.losses.head import IGNORED, next_token_targets
from megatrain.losses.loss import Loss, LossInputs
from megatrain.media import TOKEN_TYPES, MediaItem
from megatrain.models.documents import PackedDocuments
from megatrain.ranks.ownership import SOLE, Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One slice of a step's batch, of any size. Tensors are (rows, length), except in
    `loss_tensors`."""

    input_ids: Tensor
    labels: Tensor
    """The token itself where it is trained, -100 elsewhere, as in transformers."""
    attention_mask: Tensor | None = None
    """1 for tokens, 0 for padding. None: no padding."""
    position_ids: Tensor | None = None
    """Restart at each document of a packed row; then there is no attention mask."""
    loss_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of any shape that only the loss reads, by name (losses/loss.py)."""
    source_ids: Tensor | None = None
    """Number of the source of each position; an evaluation then sums each source. (rows, length)"""
    mm_token_type_ids: Tensor | None = None
    """0 for text; what else a token stands for: media.TOKEN_TYPES. None: there are no media."""
    media: Sequence[Sequence[MediaItem]] = ()
    """The items of each document, row after row, in the order of their tokens."""

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The arguments of the model's forward."""
        named = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def with_loss_tensors(self, **tensors: Tensor) -> MicroBatch:
        """Return the micro-batch with more tensors for the loss, or others by the same names."""
        return replace(self, loss_tensors={**self.loss_tensors, **tensors})

    def loss_inputs(self) -> LossInputs:
        """Return what the loss sees, on the host."""
        targets = next_token_targets(self.labels).view(self.labels.shape)
        return LossInputs(targets=targets, loss_tensors=self.loss_tensors)

    def documents(self) -> list[MicroBatch]:
        """Return each document as a micro-batch: a row, or a part of a packed row.

        It must not have `loss_tensors`.
        """
        assert not self.loss_tensors
        num_rows, length = self.input_ids.shape
        bounds = self.bounds()
        ends = range(0, num_rows * length + 1, length) if bounds is None else bounds.tolist()
        spans = [self.mapped(partial(_span, begin, end)) for begin, end in pairwise(ends)]
        if self.mm_token_type_ids is None:
            return spans
        return [replace(span, media=[items]) for span, items in zip(spans, self.media, strict=True)]

    def document_spans(self) -> list[slice]:
        """Return where each document's tokens are among those of all rows, without padding."""
        bounds = self.bounds()
        if bounds is not None:
            return [slice(begin, end) for begin, end in pairwise(bounds.tolist())]
        num_rows, length = self.input_ids.shape
        starts, ends = range(0, num_rows * length, length), self.last_tokens().tolist()
        return [slice(start, end + 1) for start, end in zip(starts, ends, strict=True)]

    def last_tokens(self) -> Tensor:
        """Return where, among all positions, the last real token of each row is. (rows,)"""
        num_rows, length = self.input_ids.shape
        mask = self.attention_mask
        lengths = torch.full((num_rows,), length) if mask is None else mask.sum(1)
        return torch.arange(num_rows) * length + lengths - 1

    def bounds(self) -> Tensor | None:
        """Return 0 and the end of each document of packed rows; None: rows are not packed.

        Ends count over the tokens of all rows, row after row; no document crosses its row. int32
        """
        if self.position_ids is None or self.attention_mask is not None:
            return None
        begins = torch.ones_like(self.position_ids, dtype=torch.bool)
        begins[:, 1:] = self.position_ids.diff() != 1
        starts = begins.flatten().nonzero().flatten()
        return F.pad(starts, (0, 1), value=begins.numel()).to(torch.int32)

    def packed_documents(self) -> PackedDocuments | None:
        """Return the documents of a micro-batch that is one packed row; None: it is not."""
        bounds = self.bounds()
        if bounds is None or len(self.input_ids) > 1:
            return None
        return PackedDocuments(lengths=tuple(bounds.diff().tolist()), bounds=bounds)

    def document_lengths(self) -> dict[str, Tensor | int]:
        """Return the bounds of documents by the names that flash attention uses, or nothing."""
        bounds = self.bounds()
        if bounds is None:
            return {}
        longest = int(bounds.diff().max())
        return {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def mapped(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """Return the micro-batch with `change` made to each tensor."""
        tensors = {**self.inputs, "labels": self.labels}
        return MicroBatch(
            **{name: change(tensor) for name, tensor in tensors.items()},
            loss_tensors={name: change(tensor) for name, tensor in self.loss_tensors.items()},
            source_ids=None if self.source_ids is None else change(self.source_ids),
            mm_token_type_ids=None
            if self.mm_token_type_ids is None
            else change(self.mm_token_type_ids),
            media=self.media,
        )

    @property
    def num_tokens(self) -> int:
        """Real tokens: padding is not counted."""
        if self.attention_mask is None:
            return self.input_ids.numel()
        return int(self.attention_mask.sum())

    @property
    def num_valid_tokens(self) -> int:
        """Tokens that are predicted and count in the loss."""
        return int((self.labels[:, 1:] != IGNORED).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """One rank's part of a step: some of its micro-batches, perhaps none."""

    batch: Sequence[MicroBatch]
    numbers: Sequence[int]
    """Number of each among the micro-batches of the step."""
    num_items: int
    """Units of the loss in the full step."""
    num_tokens: int
    """Tokens of the full step, padding not counted."""

    @classmethod
    def whole(cls, batch: Sequence[MicroBatch]) -> Self:
        """Return all of a batch, of which no loss is asked."""
        num_tokens = sum(micro.num_tokens for micro in batch)
        return cls(batch=batch, numbers=range(len(batch)), num_items=1, num_tokens=num_tokens)


def step_part(batch: Sequence[MicroBatch], loss: Loss, owner: Owner = SOLE) -> StepPart:
    """Return what `owner` does of a step on `batch`: every so-many-th micro-batch."""
    counts = (loss.num_items(micro.loss_inputs()) for micro in batch)
    return StepPart(
        batch=batch[owner.rank :: owner.size],
        numbers=range(owner.rank, len(batch), owner.size),
        num_items=sum(counts) or 1,  # a micro-batch that is tried alone may have none
        num_tokens=sum(micro.num_tokens for micro in batch),
    )


def _span(begin: int, end: int, tensor: Tensor) -> Tensor:
    """Return a part of a tensor's rows, taken as one, as a row."""
    return tensor.reshape(1, -1)[:, begin:end]


def check_batch(batch: Sequence[MicroBatch], vocab_size: int, *, predicts: bool = False) -> None:
    """Raise BatchError for a batch that trains nothing, or reads beyond the embedding.

    A prediction, with `predicts`, needs no label.
    """
    if not batch:
        raise BatchError("a step needs at least one micro-batch")
    for number, micro in enumerate(batch):
        for name, tensor in {**micro.inputs, "labels": micro.labels}.items():
            if tensor.shape != micro.input_ids.shape or tensor.dim() != 2:
                raise BatchError(
                    f"micro-batch {number}: {name} is {tuple(tensor.shape)}, "
                    f"input_ids {tuple(micro.input_ids.shape)}; both must be (rows, length)"
                )
        if micro.mm_token_type_ids is not None:
            _check_media(number, micro)
        if micro.input_ids.numel() == 0:
            raise BatchError(f"micro-batch {number} is {tuple(micro.input_ids.shape)}: no tokens")
        labels = micro.labels[micro.labels != IGNORED]
        for name, tokens in {"input_ids": micro.input_ids, "labels": labels}.items():
            outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
            if outside.numel() > 0:
                raise BatchError(
                    f"micro-batch {number}: token {int(outside[0])} in {name} is outside the "
                    f"vocabulary of {vocab_size}"
                )
    if not predicts and sum(micro.num_valid_tokens for micro in batch) == 0:
        raise BatchError(
            "no token of the step is trained: every label is -100 (were answers truncated away?)"
        )


def _check_media(number: int, micro: MicroBatch) -> None:
    """Raise BatchError unless each document has its items, and masks can tell documents apart."""
    assert micro.mm_token_type_ids is not None
    spans, types = micro.document_spans(), micro.mm_token_type_ids.flatten()
    if len(micro.media) != len(spans):
        raise BatchError(
            f"micro-batch {number}: {len(micro.media)} lists of media for {len(spans)} documents"
        )
    for place, (span, items) in enumerate(zip(spans, micro.media, strict=True)):
        told = {kind for kind, one in TOKEN_TYPES.items() if bool((types[span] == one).any())}
        if told != {item.kind for item in items}:
            raise BatchError(
                f"micro-batch {number}, document {place}: its tokens stand for "
                f"{listing(told) or 'text alone'}, its media are "
                f"{listing({item.kind for item in items}) or 'none'}"
            )
        if micro.position_ids is not None and span.start and types[span.start - 1] == types[
            span.start
        ] != 0:  # fmt: skip
            raise BatchError(
                f"micro-batch {number}, document {place}: it begins with media where the document "
                "before it ends with them, and masks take both for one. Begin it with a token."
            )


def check_closed(open_step: object | None) -> None:
    """Raise BatchError while a step in two phases has not gone back."""
    if open_step is not None:
        raise BatchError(
            "a step is open: call `backward` of what `forward` returned with a loss, or `discard`"
        )


def check_loss(batch: Sequence[MicroBatch], loss: Loss) -> None:
    """Raise BatchError where `loss` cannot be computed, or a step has nothing for it."""
    name, num_items = type(loss).__name__, 0
    for number, micro in enumerate(batch):
        for extra in sorted(micro.loss_tensors.keys() ^ set(loss.required_tensors)):
            fault = "has no" if extra in loss.required_tensors else "has"
            wants = "needs it" if extra in loss.required_tensors else "does not read it"
            raise BatchError(
                f"micro-batch {number}: loss_tensors {fault} {extra!r}, and the loss {name} {wants}"
            )
        try:
            num_items += loss.num_items(micro.loss_inputs())
        except BatchError as error:
            raise BatchError(f"micro-batch {number}: {error}") from error
    if num_items == 0:
        raise BatchError(f"the step has nothing for the loss {name} to count")
