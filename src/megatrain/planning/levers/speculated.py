"""Speculated blocks: late updates that run as gradients arrive, with the factor of a step that is
not clipped, and are taken back if the norm asks for another.

Forward alone hides late updates. Where it is shorter than they are, some blocks are updated in
backward instead, which is longer, and forward has time for the others. Each needs its weights,
masters and states once more, in case: an undo log in host memory that nothing else uses. Times here
are those of steps that are not clipped; a clipped one takes as long as without, and an undo.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, ClassVar

from megatrain.memory.kinds import bytes_per_param, store_kinds, update_traffic
from megatrain.planning.levers.lever import Lever
from megatrain.planning.levers.tier import has_tier
from megatrain.planning.machine.profile import NOT_MEASURED
from megatrain.planning.model.shapes import BlockShape
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.planning.search import Candidate, Search

UNDO_LOG = "undo log"
"""The purpose of its bytes, as in engine/undo_log.py, which needs torch; a test compares them."""
_LEAST_GAIN = 0.02
"""Share of a step: less is not worth the memory."""
_PARTS = 6
"""The search tries so many shares of the blocks."""


class SpeculatedBlocks(Lever):
    """The number of blocks that are updated before the norm is known."""

    name = "speculated_blocks"
    headroom: ClassVar[dict[str, float]] = {UNDO_LOG: 0.1}
    """Memory that nothing else asked for is not filled to the brim."""

    def applies(self, search: Search) -> bool:
        waits = search.workload.max_grad_norm is not None
        return waits and not has_matrices(search.workload)

    def seconds(self, search: Search, settings: StepSettings) -> float | None:
        """Return the time of all layers: of few, as many blocks would be all of them."""
        return search.whole_seconds(settings) if settings.speculated_blocks else None

    def filled(self, search: Search, best: Candidate) -> Candidate:
        """Return the best without speculated blocks, whatever they would save."""
        return best

    def reason(self, search: Search, settings: StepSettings) -> str:
        count, most = settings.speculated_blocks, len(_above_the_lowest(search.workload))
        if not _may_speculate(search, settings):
            return "updates are not late" if not has_tier(settings) else "states are on disk"
        missing = ""
        if count < most:
            missing = search.missing_text(settings.changed(speculated_blocks=count + 1))
        needs = "1 needs" if count == 0 else f"{count + 1} need"
        more = f"{needs} {missing}" if missing else ""
        if not count:
            return more or f"updates ahead of the norm gain less than {_LEAST_GAIN:.0%}"
        gain = search.whole_seconds(settings.changed(speculated_blocks=0)) / search.seconds(
            settings
        )
        return f"{gain - 1:+.0%}; {more or 'more are not faster'}"

    def _most_that_fit(self, search: Search, settings: StepSettings) -> int:
        counts = range(1, len(_above_the_lowest(search.workload)) + 1)
        return bisect_left(
            counts,
            True,
            key=lambda count: not search.fits(settings.changed(speculated_blocks=count)),
        )


def _may_speculate(search: Search, settings: StepSettings) -> bool:
    measured = search.profile.source != NOT_MEASURED
    may = settings.update == "late" and not has_tier(settings)
    return measured and may and not has_matrices(search.workload)


def has_matrices(workload: Workload) -> bool:
    """Return whether directions of matrices take the place of gradients: none is used twice."""
    return any(layer.matrices for layer in workload.model.structures)


def _above_the_lowest(workload: Workload) -> list[BlockShape]:
    """Return the trained blocks whose gradients arrive before the norm does."""
    return [block for block in workload.model.blocks if block.is_trained][1:]


def logged_blocks(workload: Workload, settings: StepSettings) -> list[BlockShape]:
    """Return the blocks that have a place in the undo log, with what is trained of them."""
    if not settings.speculated_blocks:
        return []
    blocks = workload.model.blocks
    trained = tuple(block.is_trained for block in blocks)
    shape = settings.shape(num_blocks=len(blocks), copying=True, trained=trained)
    return [blocks[number].trained_part for number in shape.speculated_blocks]


def ahead_traffic(workload: Workload, settings: StepSettings) -> float:
    """Return the host memory traffic of an update that is logged, in bytes per element."""
    states, is_fp32 = workload.states[settings.state], workload.dtype == "fp32"
    logged = bytes_per_param(store_kinds(states, waits=False), is_fp32=is_fp32)
    return 2 * logged + update_traffic(states, is_fp32=is_fp32)
