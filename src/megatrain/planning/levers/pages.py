"""Pages of experts: a mixture's experts visit the device a part at a time, while their layer
computes, so that a layer need not fit on the device.

Memory is two pages in place of all experts in two slots. The price is the link: experts cross once
in a forward and twice in a backward, for each micro-batch and tile, where a whole layer is fetched
twice in a step. So pages are for layers that do not fit, and go with large micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatrain.errors import ConfigError
from megatrain.narrow import form_bytes
from megatrain.planning.levers.lever import Lever
from megatrain.planning.model.shapes import BlockShape, ModelShape
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.config import Config
    from megatrain.planning.fixes import Fix
    from megatrain.planning.search import Search

PAGES = (1, 2, 4, 8, 16, 32, 64, 128)
PLANNED_PAGE_SLOTS = 2
"""The same number as in engine/pages.py, which needs torch; a test compares them."""


class ExpertPages(Lever):
    """The parts in which experts visit the device; 1: all at once, with their layer."""

    name = "expert_pages"
    key = "memory.expert_pages"
    turns = (-1, -1, 5)
    frugal_turn = 3
    fix_cost = 0.45

    def applies(self, search: Search) -> bool:
        return num_experts(search.workload.model) > 0

    def check(self, config: Config, model: ModelShape) -> None:
        pages = config.memory.expert_pages
        if pages == "auto" or pages == 1:
            return
        if not num_experts(model) or not model.pages:
            code = "has no experts" if not num_experts(model) else "computes experts in its own way"
            raise ConfigError(
                f"memory.expert_pages is {pages}, but the code of {model.name} {code}. "
                "Set it to 1, or to auto."
            )

    def why_not_compiled(self, config: Config) -> str:
        pages = config.memory.expert_pages
        return "experts come in pages" if isinstance(pages, int) and pages > 1 else ""

    def choices(self, search: Search) -> list[int]:
        """Return pages of fewer and fewer experts, where experts can come in pages at all."""
        most = num_experts(search.workload.model) if may_page(search) else 1
        return [count for count in PAGES if count <= most]

    def around(self, search: Search, settings: StepSettings) -> Iterator[StepSettings]:
        """Yield fewer and more pages: memory that is left may hold larger ones."""
        if self.name in search.pins or not may_page(search):
            return
        for count in self.choices(search):
            if count in (settings.expert_pages // 2, 2 * settings.expert_pages):
                yield settings.changed(expert_pages=count)

    def given_up(self, settings: StepSettings) -> int:
        return settings.expert_pages

    def reason(self, search: Search, settings: StepSettings) -> str:
        if search.profile.unified:
            return "unused: compute reads the store"
        if not may_page(search):
            return "layers are compiled" if search.workload.compiled else "layers stay whole"
        if settings.expert_pages == 1:
            return "all experts of a layer fit"
        fewer = settings.changed(expert_pages=settings.expert_pages // 2)
        way = "all at once" if fewer.expert_pages == 1 else str(fewer.expert_pages)
        return f"{way} {search.compared(settings, fewer)}"

    def fix(self, start: Fix) -> Fix | None:
        """Let the plan cut experts into pages, where the user wants larger ones."""
        return start.left_to_plan(self)


def may_page(search: Search) -> bool:
    """Return whether experts may come in pages: on one rank, layers not compiled, without Muon."""
    workload = search.workload
    copies = not search.profile.unified and workload.division.is_alone
    whole = workload.compiled or any(layer.matrices for layer in workload.model.structures)
    return copies and workload.model.pages and num_experts(workload.model) > 0 and not whole


def num_experts(model: ModelShape) -> int:
    """Return the experts of the layer that has most; 0: it is no mixture."""
    return max(layer.num_experts if layer.paged_tensors else 0 for layer in model.structures)


def comes_in_pages(block: BlockShape, settings: StepSettings) -> bool:
    return settings.expert_pages > 1 and bool(block.paged_tensors)


def in_slot(block: BlockShape, settings: StepSettings) -> BlockShape:
    """Return what a fetch of the block brings into its slot."""
    return block.without_experts if comes_in_pages(block, settings) else block


def held(block: BlockShape, settings: StepSettings) -> BlockShape:
    """Return the block as one op holds its gradients: of experts, a page at a time."""
    if not comes_in_pages(block, settings):
        return block
    return block.with_page(settings.expert_pages)


def page_slot_bytes(workload: Workload, settings: StepSettings) -> int:
    """Return the bytes of the slots that pages rotate through."""
    if settings.expert_pages == 1:
        return 0
    layers, width = workload.model.structures, workload.element_bytes
    sizes = (layer.page_slot_bytes(settings.expert_pages, width) for layer in layers)
    return PLANNED_PAGE_SLOTS * max(sizes)


def walked_bytes(block: BlockShape, workload: Workload, settings: StepSettings) -> int:
    """Return what comes over the link each time that a product of each expert is computed."""
    if not comes_in_pages(block, settings):
        return 0
    plain = sum(tensor.num_elements for tensor in block.paged_tensors if not tensor.form)
    narrow = sum(form_bytes(tensor.form) for tensor in block.paged_tensors)
    return workload.element_bytes * plain + narrow
