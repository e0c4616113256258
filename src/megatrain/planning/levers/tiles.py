"""Tiles: a layer computes so many tokens at a time, but for its attention, and holds less.

A tile computes what is before attention once more on the way back. Taken only where full rows do
not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatrain.planning.levers.lever import Lever, as_optional_tokens
from megatrain.planning.levers.pages import comes_in_pages, held, in_slot
from megatrain.planning.memory.kernels import Kernels
from megatrain.planning.memory.layers import full_rows_bytes, page_bytes, tiled_bytes
from megatrain.planning.model.shapes import BlockShape
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.config import Config
    from megatrain.planning.fixes import Fix
    from megatrain.planning.search import Search

TILES = (None, 16384, 8192, 4096, 2048, 1024)


class TileTokens(Lever):
    """The tokens that a layer computes at a time; None: the full row."""

    name = "tile_tokens"
    key = "memory.tile_tokens"
    is_kept = True
    changes_forward = True
    turns = (0, 0, 0)
    frugal_turn = 1
    fix_cost = 0.5

    def why_not_compiled(self, config: Config) -> str:
        return "layers run over tiles" if isinstance(config.memory.tile_tokens, int) else ""

    def choices(self, search: Search) -> tuple[int | None, ...]:
        workload = search.workload
        tiled = (
            workload.model.tiled and not workload.compiled and not search.settings.keeps_activations
        )
        return TILES if tiled else TILES[:1]

    def least(self, search: Search) -> list[int | None]:
        """Return the smallest tiles, and full rows: tiles save memory in most cases, not in all."""
        allowed = self.allowed(search)
        return list(dict.fromkeys([allowed[-1], allowed[0]]))

    def given_up(self, settings: StepSettings) -> int:
        return wants_tiles(settings)

    def reason(self, search: Search, settings: StepSettings) -> str:
        tile = settings.tile_tokens
        if tile is None:
            return "full rows fit"
        if tile >= settings.micro_batch_tokens:
            return "no row is longer"
        missing = search.missing_text(settings.changed(tile_tokens=None))
        return f"full rows need {missing}" if missing else "full rows are not faster"

    def fix(self, start: Fix) -> Fix | None:
        """Let the plan cut rows into tiles, where the user wants full rows or larger tiles."""
        return start.left_to_plan(self)

    def read(self, training: Mapping[str, Any]) -> int | None:
        return as_optional_tokens(training["tile_tokens"])


def tile_of(workload: Workload, settings: StepSettings) -> int | None:
    """Return the tokens of a tile, where micro-batches have several; None: full rows."""
    tile, longest = settings.tile_tokens, min(settings.micro_batch_tokens, workload.step_tokens)
    if tile is None or tile >= longest or workload.compiled or not workload.model.tiled:
        return None
    return tile


def wants_tiles(settings: StepSettings) -> bool:
    return settings.tile_tokens is not None


def at_once(
    workload: Workload, settings: StepSettings, block: BlockShape, tokens: int
) -> tuple[int, int]:
    """Return the tokens that a layer computes at once, and how often for a micro-batch."""
    tile = tile_of(workload, settings)
    if tile is None or tile >= tokens or block.attention is None:
        return tokens, 1
    return tile, -(-tokens // tile)


def layer_bytes(
    block: BlockShape, workload: Workload, settings: StepSettings, kernels: Kernels
) -> float:
    """Return what the backward of a layer holds at its largest, with the longest micro-batch."""
    tokens = max(workload.micro_sizes(settings.micro_batch_tokens))
    gradients = in_slot(block, settings).gradient_bytes(workload.dtype)  # pages are added before
    paged = comes_in_pages(block.trained_part, settings)
    tile, block = tile_of(workload, settings), held(block, settings)
    if tile is None or block.attention is None:
        largest = full_rows_bytes(block, workload, tokens, kernels, gradients)
        return max(largest, page_bytes(block, workload, tokens)) if paged else largest
    return tiled_bytes(block, block.attention, workload, tokens, tile, kernels)
