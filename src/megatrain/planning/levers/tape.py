"""The tape: inputs of layers, from forward to their recompute, on the device or on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.planning.levers.kept import layers_that_keep
from megatrain.planning.levers.lever import Lever
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Search

TAPE_ALIGNMENT = 256
"""The same number as in engine/tape.py, which needs torch; a test compares them."""


class Tape(Lever):
    """The place of the tape."""

    name = "tape"
    key = "memory.tape"
    is_tried = True

    def choices(self, search: Search) -> list[str]:
        return ["device"] if search.profile.unified else ["device", "host"]

    def least(self, search: Search) -> list[str]:
        """Return both: on the host it needs less of the device, and more of the host."""
        return list(self.allowed(search))

    def reason(self, search: Search, settings: StepSettings) -> str:
        if search.profile.unified:
            return "host and device are one memory"
        other = "host" if settings.tape == "device" else "device"
        return f"a {other} tape {search.compared(settings, settings.changed(tape=other))}"


def device_tape_bytes(workload: Workload, settings: StepSettings) -> int:
    """Return what the device has of the tape: all of it, or a ring between compute and the host."""
    aligned = [-(-size // TAPE_ALIGNMENT) * TAPE_ALIGNMENT for size in _sizes(workload, settings)]
    num_layers = _num_layers(workload, settings)
    if settings.tape == "device":
        return num_layers * sum(aligned)
    return settings.tape_slots * max(aligned) if num_layers else 0


def host_tape_bytes(workload: Workload, settings: StepSettings) -> int:
    """Return what the host has of the tape, where it is a device's."""
    return unified_tape_bytes(workload, settings) if settings.tape == "host" else 0


def unified_tape_bytes(workload: Workload, settings: StepSettings) -> int:
    """Return the bytes of all taped inputs, where host and device are one memory."""
    return _num_layers(workload, settings) * sum(_sizes(workload, settings))


def _sizes(workload: Workload, settings: StepSettings) -> list[int]:
    """Return the bytes of one layer's input of each micro-batch."""
    per_token = workload.model.hidden * workload.element_bytes
    return [tokens * per_token for tokens in workload.micro_sizes(settings.micro_batch_tokens)]


def _num_layers(workload: Workload, settings: StepSettings) -> int:
    """Return how many layers have their inputs on the tape."""
    return workload.model.num_layers - len(layers_that_keep(workload, settings))
