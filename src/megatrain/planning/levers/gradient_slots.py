"""Gradient slots: fp32 sums that layers rotate through; with one, compute waits for each drain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.planning.levers.embedding_rows import sums_of_embedding
from megatrain.planning.levers.lever import Lever
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Candidate, Search


class GradSlots(Lever):
    """The gradient slots that layers rotate through."""

    name = "grad_slots"
    turns = (2, 1, 3)

    def choices(self, search: Search) -> list[int]:
        return [2, 1]

    def settled(self, search: Search, best: Candidate) -> Candidate:
        """Return the best with one gradient slot, if it takes no longer."""
        if self.name in search.pins or best.settings.grad_slots == 1:
            return best
        return search.no_slower(best, best.settings.changed(grad_slots=1))

    def reason(self, search: Search, settings: StepSettings) -> str:
        other = 3 - settings.grad_slots
        return f"{other} {search.compared(settings, settings.changed(grad_slots=other))}"


def gradient_slot_bytes(workload: Workload, settings: StepSettings) -> tuple[int, int]:
    """Return the fp32 sums: of those that layers take turns with, and of the edges."""
    model, count = workload.model, settings.grad_slots
    sizes = [layer.trained_elements() for layer in model.structures]
    trained = [layer.is_trained for layer in model.structures]
    turns = [sizes[kind] for kind in reversed(model.layer_kinds) if trained[kind]]
    embedding = sums_of_embedding(workload, settings)
    edges = [embedding, model.head.trained_elements()]
    slots = [max(turns[slot::count], default=0) for slot in range(count)]
    return 4 * sum(slots), 4 * (sum(edges) if model.tied else max(edges, default=0))
