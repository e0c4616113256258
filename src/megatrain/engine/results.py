"""The result of a step: its loss, figures and faults, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import Any

from megatrain.batch import MicroBatch
from megatrain.ranks.ranks import RankInfo, Ranks

SOURCE_LOSS, SOURCE_UNITS = "loss of source ", "units of source "
"""The names of an evaluation's figures for each source, before its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteInfo:
    """A gradient that was not finite, and where."""

    blocks: tuple[int, ...]
    """Blocks whose gradient was not finite at first."""
    repeated: bool
    """True: the same when run again, so data or model. False: gone, so hardware."""
    micro: int | None = None
    """The first micro-batch that shows it alone."""
    documents: tuple[int, ...] = ()
    """Its documents that show it alone, counted over its rows: each is one, or packed with them."""

    def __str__(self) -> str:
        text = f"not finite in blocks {', '.join(map(str, self.blocks))}"
        if not self.repeated:
            return f"{text}; finite when run again: suspect the hardware"
        if self.micro is None:
            return f"{text}; no micro-batch shows it alone"
        documents = ", ".join(map(str, self.documents)) or "all"
        return f"{text}; micro-batch {self.micro}, documents {documents}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one step."""

    loss: float
    """Mean over the units of the step: its trained tokens, unless the loss counts others."""
    micro_losses: tuple[float, ...]
    """Each micro-batch's part of it, in order."""
    num_tokens: int
    num_valid_tokens: int
    grad_norm: float | None
    """Before clipping; None where updates ran before it was known."""
    aux_loss: float | None = None
    """Load-balancing loss over the full step, not yet multiplied; None if it is not trained on."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further figures of the loss, by name: means over the units of the step."""
    nonfinite: NonFiniteInfo | None = None
    applied: bool = True
    """False: the step was skipped because of `nonfinite`."""
    rank_info: Sequence[RankInfo] = ()
    """Each rank's message with the step."""


class SharedResults:
    """The results of all ranks: losses and figures in the order of micro-batches, and messages.

    A collective: all ranks must build it.
    """

    def __init__(
        self,
        ranks: Ranks,
        losses: Sequence[float],
        figures: Sequence[Mapping[str, float]],
        num_items: int,
        aux_loss: float | None,
        says: RankInfo | None = None,
    ) -> None:
        """`losses` and `figures` are of this rank's own micro-batches, `aux_loss` of all if any."""
        said = {"losses": losses, "figures": figures, "aux_loss": aux_loss, "said": says or {}}
        shared = ranks.agree(said)
        known = [of_rank["aux_loss"] for of_rank in shared if of_rank["aux_loss"] is not None]
        self.aux_loss: float | None = known[0] if known else None
        self.said: list[RankInfo] = [of_rank["said"] for of_rank in shared]
        self.losses: list[float] = _in_turn([of_rank["losses"] for of_rank in shared])
        sums: dict[str, float] = {}
        for found in _in_turn([of_rank["figures"] for of_rank in shared]):
            for name, figure in found.items():
                sums[name] = sums.get(name, 0.0) + figure
        self.figures = {name: total / num_items for name, total in sums.items()}
        """Means over the units of the loss."""


def _in_turn(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the items of all lists, the first of each before the second of any."""
    missing = object()
    taken = chain.from_iterable(zip_longest(*lists, fillvalue=missing))
    return [item for item in taken if item is not missing]


def locate_fault(
    fault: NonFiniteInfo, batch: Sequence[MicroBatch], is_finite: Callable[[MicroBatch], bool]
) -> NonFiniteInfo:
    """Return `fault` with the first micro-batch, and its documents, whose gradient is at fault.

    Documents are not tried alone where `loss_tensors` may tie them together.
    """
    for number, micro in enumerate(batch):
        if micro.num_valid_tokens and not is_finite(micro):
            parts = enumerate([] if micro.loss_tensors else micro.documents())
            faulty = [at for at, part in parts if part.num_valid_tokens and not is_finite(part)]
            return replace(fault, micro=number, documents=tuple(faulty))
    return fault
