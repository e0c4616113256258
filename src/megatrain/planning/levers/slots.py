"""Weight slots: layers rotate through them, and those beyond two keep the last layers for backward.

More slots pay where a step waits for fetches: the layers that are still there are not fetched
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatrain.planning.levers.lever import Lever
from megatrain.planning.levers.pages import in_slot
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Search

_COUNTS = (3, 4, 8, 16, 32, 64, 128)


class Slots(Lever):
    """The slots that layers rotate through."""

    name = "slots"
    key = "memory.slots"

    def around(self, search: Search, settings: StepSettings) -> Iterator[StepSettings]:
        if self.name in search.pins or not search.waits_for_fetches(settings):
            return
        layers = search.workload.model.num_layers
        for count in sorted({count for count in (*_COUNTS, layers) if count <= layers}):
            yield settings.changed(slots=count)

    def seconds(self, search: Search, settings: StepSettings) -> float | None:
        """Return the time of all layers: few of them would all stay in their slots."""
        return search.whole_seconds(settings) if settings.slots > search.few_layers else None

    def reason(self, search: Search, settings: StepSettings) -> str:
        if search.profile.unified:
            return "unused: compute reads the store"
        if settings.slots == 2:
            return f"3 {search.compared(settings, settings.changed(slots=3))}"
        return f"the last {settings.slots} layers are fetched once, not twice"


def layer_slot_bytes(workload: Workload, settings: StepSettings) -> int:
    """Return the bytes of the slots that layers rotate through.

    A slot has the narrow params of its block, and room for them when they are widened.
    """
    gathered = workload.division.gathered
    dtype = workload.dtype
    layers = [in_slot(layer, settings) for layer in workload.model.structures]
    sizes = [layer.weight_bytes(dtype, gathered) + layer.wide_bytes(dtype) for layer in layers]
    return settings.slots * max(sizes)
