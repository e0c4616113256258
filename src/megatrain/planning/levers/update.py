"""When the optimizer updates a block: as its gradient arrives, or once all norms are known.

Exact clipping waits for the global norm, so gradients wait in the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.memory.kinds import Kind, store_kinds
from megatrain.planning.levers.lever import Lever
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Search


class Update(Lever):
    """The time of updates. Clipping decides it."""

    name = "update"

    def choices(self, search: Search) -> list[str]:
        return ["in_backward" if search.workload.max_grad_norm is None else "late"]

    def reason(self, search: Search, settings: StepSettings) -> str:
        if search.workload.max_grad_norm is not None:
            return "exact clipping: updates behind the next forward"
        return "no clipping: updates as gradients arrive"


UPDATE = Update()


def kinds(workload: Workload, settings: StepSettings) -> tuple[Kind, ...]:
    """Return what a store keeps for each param."""
    return store_kinds(workload.states[settings.state], waits=settings.update == "late")


def in_backward(settings: StepSettings) -> bool:
    """Return whether a block is updated as soon as its gradient arrives."""
    return settings.update == "in_backward"


def without_clipping(settings: StepSettings) -> StepSettings:
    """Return settings whose updates need no norm."""
    return settings.changed(update="in_backward")
