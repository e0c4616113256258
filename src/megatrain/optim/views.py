"""Views of the store that an optimizer is handed for an update.

Inside a segment, params of equal treatment that follow each other form a run, and each run is one
update: one pass over plain memory. A matrix of a hidden layer is a run of its own, if it has other
states than the rest: its shape decides its step. Views are made for each update, so that states may
live elsewhere, and runs are cut to the part that a rank owns, without the optimizer knowing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import Layout, Segment, overlap
from megatrain.memory.store import Store
from megatrain.models.decoder import Param


class Treatment(NamedTuple):
    """What of an optimizer's settings differs between params."""

    lr_ratio: float
    """Factor on the learning rate."""
    weight_decay: float


class Treats(Protocol):
    """The part of an optimizer that decides how params are updated."""

    @property
    def states(self) -> tuple[TensorKind, ...]:
        """The states that an update is handed, in this order."""

    def treated(self, params: Collection[Param]) -> dict[str, Treatment]:
        """Return the treatment of each param, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """Flat host tensors: index i of each belongs to the same element of a param."""

    weight: Tensor
    """bf16 (the upper half of the fp32 master) or fp32."""
    lo: Tensor | None
    """The lower half of the master; None where the weight is fp32."""
    states: tuple[Tensor, ...]
    """In the order in which the optimizer declares them; shorter where elements share a number."""
    treatment: Treatment
    matrix: tuple[int, int] | None = None
    """Rows and columns of the matrix, or of each of several, that the elements are of; None where
    the optimizer keeps the same states for all."""
    first: int
    """Number of the first element among the trained elements of the store, padding included. The
    same for any number of threads and ranks: a part of a run counts from its own first element."""


@dataclass(frozen=True, slots=True)
class _Run:
    start: int
    stop: int
    treatment: Treatment
    matrix: tuple[int, int] | None


class UpdateViews:
    """Hands out the views of one store for one optimizer."""

    def __init__(self, store: Store, optimizer: Treats) -> None:
        """Raises ConfigError if the store lacks a state, or for patterns without a match."""
        states, layout = optimizer.states, store.layout
        if lacking := [kind for kind in states if kind not in store.kinds]:
            names = ", ".join(map(str, lacking))
            raise ConfigError(
                f"the optimizer keeps {names}, which the store does not have. Give the store's "
                "kinds the optimizer's states."
            )
        self._store, self._states = store, states
        treated = optimizer.treated([place.param for place in layout.places.values()])
        self._runs: dict[int, list[_Run]] = {}
        self._firsts: dict[int, int] = {}
        for segment in layout.segments:
            if segment.trained:
                self._runs[id(segment)] = _runs(layout, segment, treated)
                self._firsts[id(segment)] = layout.first_trained(segment)

    def of(self, segment: Segment, region: Tensor | None = None) -> Iterator[tuple[slice, Views]]:
        """Yield the runs of what is here of a segment: where each is in its gradient, its views.

        `region` has what the segment's block has on disk; None if that is nothing.
        """
        weight = self._segment(segment, TensorKind.HI)
        lo = (
            self._segment(segment, TensorKind.LO, region)
            if TensorKind.LO in segment.starts
            else None
        )
        kept = [kind for kind in self._states if kind in segment.starts]
        states = [(kind, self._segment(segment, kind, region)) for kind in kept]
        for run in self._runs[id(segment)]:
            span = slice(run.start, run.stop)
            yield (
                span,
                Views(
                    weight=weight[span],
                    lo=None if lo is None else lo[span],
                    states=tuple(_part(*state, span) for state in states),
                    treatment=run.treatment,
                    matrix=run.matrix,
                    first=self._firsts[id(segment)] + segment.owned.start + run.start,
                ),
            )

    def _segment(self, segment: Segment, kind: TensorKind, region: Tensor | None = None) -> Tensor:
        # `.data` has its own version. Weights of all blocks are views of one arena, and
        # autograd would take an update of one block for a change of weights that another needs.
        return self._store.segment(segment, kind, region).data


def _part(kind: TensorKind, numbers: Tensor, span: slice) -> Tensor:
    """Return the numbers of some elements, of all that is here of a segment in a kind."""
    shared = kind.elements_per_number
    return numbers[span.start // shared : span.stop // shared]


def _runs(layout: Layout, segment: Segment, treated: Mapping[str, Treatment]) -> list[_Run]:
    """Return the runs of what is here, counted from its first element."""
    runs: list[_Run] = []
    owned = segment.owned
    for place in layout.segment_places(segment):
        here = overlap(range(place.start, place.padded_stop), owned)
        if not here:
            continue
        treatment = treated[place.param.name]
        start, stop = here.start - owned.start, here.stop - owned.start
        matrix = None
        if segment.matrices:
            *_, rows, columns = place.param.shape
            matrix = (rows, columns)
        elif runs and runs[-1].treatment == treatment:
            start = runs.pop().start
        runs.append(_Run(start, stop, treatment, matrix))
    return runs
