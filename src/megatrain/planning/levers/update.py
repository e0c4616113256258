"""When the optimizer updates a block, and with it what waits in host memory.

    in_backward       as its gradient arrives: nothing waits. Without clipping
    late              once the norm of the step is known, behind the next forward: all gradients
                      wait in the store, 2 bytes per bf16 param
    second_backward   backward runs for the norm alone, and once more with the factor known, with
                      updates as gradients arrive: nothing waits, at 1.75 times the compute

The last two clip exactly, and to the same bits. The second backward is for machines on which
waiting gradients do not fit; layers compute everything again in it, so none keeps activations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.memory.kinds import TensorKind, store_kinds
from megatrain.planning.levers.lever import Lever
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Search


class Update(Lever):
    """The time of updates."""

    name = "update"

    def choices(self, search: Search) -> list[str]:
        if search.workload.max_grad_norm is None:
            return ["in_backward"]
        return ["late"] if search.settings.keeps_activations else ["late", "second_backward"]

    def reason(self, search: Search, settings: StepSettings) -> str:
        from megatrain.planning.levers.homes import homes_before, lacking

        if search.workload.max_grad_norm is None:
            return "no clipping: updates as gradients arrive"
        if not goes_back_twice(settings):
            return "exact clipping: updates behind the next forward"
        waiting = [home for home in homes_before(search, settings) if home.update == "late"]
        return f"waiting gradients are {lacking(search, waiting[-1])} short"

    def is_costly(self, settings: StepSettings) -> bool:
        return goes_back_twice(settings)


UPDATE = Update()


def kinds(workload: Workload, settings: StepSettings) -> tuple[TensorKind, ...]:
    """Return what a store keeps for each param."""
    return store_kinds(workload.states[settings.state], waits=settings.update == "late")


def goes_back_twice(settings: StepSettings) -> bool:
    """Return whether backward runs for the norm, and once more for the updates."""
    return settings.update == "second_backward"


def arrives_in_ring(settings: StepSettings) -> bool:
    """Return whether gradients pass through a ring on the host, in which none waits for a norm."""
    return settings.update != "late"


def staying_bytes(workload: Workload, settings: StepSettings) -> int:
    """Return the outputs of the last layer that stay on the device for a second backward."""
    if not goes_back_twice(settings):
        return 0
    tokens = sum(workload.micro_sizes(settings.micro_batch_tokens))
    return tokens * workload.model.hidden * workload.element_bytes


def without_clipping(settings: StepSettings) -> StepSettings:
    """Return settings whose updates need no norm."""
    return settings.changed(update="in_backward")
