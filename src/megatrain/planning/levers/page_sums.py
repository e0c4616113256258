"""Where gradients of experts in pages add up: in a gradient slot of the device, or at home.

A slot is in fp32, twice the layer. At home, each page's gradient leaves with it: at once where a
step has one micro-batch, else its sum comes back for each further one. So it costs nothing in a
step of one micro-batch, and the link in others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.planning.levers.lever import Lever
from megatrain.planning.levers.pages import (
    comes_in_pages,
    num_experts,
    page_elements,
)
from megatrain.planning.levers.tiles import tile_of
from megatrain.planning.model.shapes import BlockShape
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Search


class ExpertSums(Lever):
    """The place of sums of experts' gradients."""

    name = "expert_sums"
    turns = (5, 5, 6)

    def applies(self, search: Search) -> bool:
        return num_experts(search.workload.model) > 0 and not search.profile.unified

    def choices(self, search: Search) -> list[str]:
        return ["device"]

    def reason(self, search: Search, settings: StepSettings) -> str:
        if settings.expert_pages == 1:
            return "unused: experts are with their layer"
        other = "home" if settings.expert_sums == "device" else "device"
        way = "at home it" if other == "home" else "on the device it"
        return f"{way} {search.compared(settings, settings.changed(expert_sums=other))}"


def leaves_with_page(block: BlockShape, settings: StepSettings) -> bool:
    """Return whether the gradient of a block's experts leaves in its backward."""
    return settings.expert_sums == "home" and comes_in_pages(block, settings)


def in_gradient_slot(block: BlockShape, settings: StepSettings) -> BlockShape:
    """Return what of a block adds up in a gradient slot, and leaves with its drain."""
    return block.without_experts if leaves_with_page(block, settings) else block


def num_parts(workload: Workload, settings: StepSettings) -> int:
    """Return in how many parts gradients come, as far as it matters: one, or more."""
    micros = workload.num_micro(settings.micro_batch_tokens)
    return micros if tile_of(workload, settings) is None else 2 * micros


def passing_bytes(workload: Workload, settings: StepSettings) -> int:
    """Return the device buffers that gradients of pages, and sums, pass."""
    layers = workload.model.structures
    if not any(leaves_with_page(layer.trained_part, settings) for layer in layers):
        return 0
    several = num_parts(workload, settings) > 1
    return (4 if several else 2) * 4 * page_elements(workload, settings)


def host_sum_bytes(workload: Workload, settings: StepSettings) -> int:
    """Return the sums in fp32 of one block's experts, on the host."""
    if num_parts(workload, settings) == 1:
        return 0
    return 4 * max(
        sum(tensor.num_elements for tensor in layer.trained_part.paged_tensors)
        if leaves_with_page(layer.trained_part, settings)
        else 0
        for layer in workload.model.structures
    )


def summed_bytes(
    block: BlockShape,
    workload: Workload,
    settings: StepSettings,
    *,
    tiles: int,
    adds: bool,
    completes: bool,
) -> tuple[int, int]:
    """Return what an op's gradients of experts move: sums that come back, and what leaves."""
    if not leaves_with_page(block.trained_part, settings):
        return 0, 0
    elements = sum(tensor.num_elements for tensor in block.trained_part.paged_tensors)
    inward = 4 * (tiles if adds else tiles - 1)
    outward = 4 * (tiles - completes) + workload.element_bytes * completes
    return inward * elements, outward * elements
