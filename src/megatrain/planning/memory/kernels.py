"""Memory that the kernels of a device hold beside their results."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.step.settings import DEVICE_PART_ELEMENTS, PART_ELEMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Kernels of one device. A rehearsal on the meta device holds none of it."""

    widens: bool = False
    """A sum of fp32 and bf16 first makes fp32 of the latter."""
    part_elements: int = DEVICE_PART_ELEMENTS
    """Logits that are scored at once."""
    accumulates: bool = False
    """Backward of attention adds up dQ in fp32, and dK and dV for each query head apart."""


HOST_KERNELS = Kernels(widens=True, part_elements=PART_ELEMENTS)
CARD_KERNELS = Kernels(accumulates=True)
