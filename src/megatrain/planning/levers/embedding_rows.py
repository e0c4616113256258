"""Embedding rows: those of a step's tokens are sent to the device, in place of the full table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatrain.planning.levers.lever import Lever
from megatrain.planning.workload import Workload
from megatrain.step.ops import Op, Role
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Search


class GatherEmbedding(Lever):
    """Whether rows are gathered."""

    name = "gather_embedding"
    turns = (4, 4, 4)

    def choices(self, search: Search) -> list[bool]:
        return [False, True] if may_gather(search) else [False]

    def allowed(self, search: Search) -> list[bool]:
        """Return the full table alone where rows cannot be gathered, whatever is set."""
        return list(super().allowed(search)) if may_gather(search) else [False]

    def around(self, search: Search, settings: StepSettings) -> Iterator[StepSettings]:
        if self.name not in search.pins and may_gather(search):
            yield settings.changed(gather_embedding=not settings.gather_embedding)

    def reason(self, search: Search, settings: StepSettings) -> str:
        if search.workload.model.tied:
            return "the head reads the table too"
        if not search.workload.division.is_alone:
            return "the table is divided among ranks"
        if search.profile.unified:
            return "unused: compute reads the store"
        other = settings.changed(gather_embedding=not settings.gather_embedding)
        way = "the full table" if settings.gather_embedding else "gathering rows"
        return f"{way} {search.compared(settings, other)}"


def may_gather(search: Search) -> bool:
    """Return whether rows can be gathered, for this model on this machine."""
    alone, profile = search.workload.division.is_alone, search.profile
    copies = not profile.unified and not profile.on_host
    return alone and not search.workload.model.tied and copies


def table_bytes(workload: Workload, settings: StepSettings) -> int:
    """Return the bytes of the slot of the full table."""
    if settings.gather_embedding:
        return 0
    return workload.model.embedding.weight_bytes(workload.dtype, workload.division.gathered)


def row_bytes(workload: Workload, settings: StepSettings) -> int:
    """Return the bytes of gathered rows."""
    return gathered_bytes(workload) if settings.gather_embedding else 0


def gathered_bytes(workload: Workload) -> int:
    """Return the bytes of the rows of one step's tokens."""
    return workload.distinct_tokens() * workload.model.hidden * workload.element_bytes


def looked_up_rows(workload: Workload, settings: StepSettings) -> int:
    """Return the rows that the embedding's backward makes a gradient of, on a device."""
    return workload.distinct_tokens() if settings.gather_embedding else workload.model.vocab


def sums_of_embedding(workload: Workload, settings: StepSettings) -> int:
    """Return the elements of the embedding's gradient that add up on the device."""
    elements = workload.model.embedding.trained_elements()
    if settings.gather_embedding:
        elements = min(elements, workload.distinct_tokens() * workload.model.hidden)
    return elements


def input_numbers(settings: StepSettings) -> int:
    """Return the integers per token that the device has of the batch for gathered rows."""
    return int(settings.gather_embedding)


def gathers(op: Op, settings: StepSettings) -> bool:
    """Return whether an op moves rows of the embedding instead of all of it."""
    return op.role is Role.EMBEDDING and settings.gather_embedding
