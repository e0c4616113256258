"""Kept layers: the top layers whose activations stay on the device, so that backward computes
nothing of them again. They take what memory is left over."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, ClassVar

from megatrain.errors import ConfigError
from megatrain.planning.levers.lever import Lever
from megatrain.planning.levers.tiles import tile_of
from megatrain.planning.levers.update import goes_back_twice
from megatrain.planning.machine.profile import NOT_MEASURED
from megatrain.planning.memory.layers import kept_per_token
from megatrain.planning.model.shapes import BlockShape, ModelShape
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

if TYPE_CHECKING:
    from megatrain.config import Config
    from megatrain.planning.fixes import Fix
    from megatrain.planning.search import Candidate, Search

KEPT_ACTIVATIONS = "kept activations"
"""The purpose of activations that stay from forward to backward."""


class KeptLayers(Lever):
    """The number of top layers that keep their activations."""

    name = "kept_layers"
    key = "memory.kept_layers"
    headroom: ClassVar[dict[str, float]] = {KEPT_ACTIVATIONS: 0.1}
    """They are many tensors, predicted by rules."""
    fix_cost = 0.4

    def check(self, config: Config, model: ModelShape) -> None:
        kept = config.memory.kept_layers
        if kept != "auto" and kept > model.num_layers:
            raise ConfigError(
                f"memory.kept_layers is {kept}, but {model.name} has {model.num_layers} layers. "
                f"Set it to {model.num_layers} or less, or to auto."
            )

    def seconds(self, search: Search, settings: StepSettings) -> float | None:
        """Return as much of the way from none to all of the layers."""
        layers = search.workload.model.num_layers
        if not 0 < settings.kept_layers < layers:
            return None
        none, every = (search.seconds(settings.changed(kept_layers=count)) for count in (0, layers))
        return none + (every - none) * settings.kept_layers / layers

    def filled(self, search: Search, best: Candidate) -> Candidate:
        """Return the best with as many kept layers as memory is left for.

        Not where that does not save time, and not on a machine that was not measured.
        """
        if self.name in search.pins or not may_keep(search, best.settings):
            return best
        counts = range(1, search.workload.model.num_layers + 1)
        too_many = bisect_left(
            counts,
            True,
            key=lambda count: not search.fits(best.settings.changed(kept_layers=count)),
        )
        if too_many == 0:
            return best
        return search.faster(best, best.settings.changed(kept_layers=too_many))

    def reason(self, search: Search, settings: StepSettings) -> str:
        count, layers = settings.kept_layers, search.workload.model.num_layers
        if not count and not may_keep(search, settings):
            if goes_back_twice(settings):
                return "backward runs twice"
            tiled = tile_of(search.workload, settings) is not None
            return "layers run over tiles" if tiled else "what these layers hold is not known"
        if not count or count < layers:
            missing = search.missing_text(settings.changed(kept_layers=count + 1))
            more = f"{count + 1} need {missing}" if missing else "more are not faster"
        if not count:
            return more
        gain = search.seconds(settings.changed(kept_layers=0)) / search.seconds(settings) - 1
        if count >= layers:
            return f"all layers, nothing computed twice: {gain:+.0%}"
        return f"{gain:+.0%}; {more}"

    def fix(self, start: Fix) -> Fix | None:
        """Let the plan say how many layers keep their activations."""
        return start.left_to_plan(self, kept_layers=0)

    def smaller(self, workload: Workload, settings: StepSettings) -> tuple[int, str, str] | None:
        if not (before := settings.kept_layers):
            return None
        return 0, "activations given up", f"{before} layers do not keep their activations"


def may_keep(search: Search, settings: StepSettings) -> bool:
    """Return whether the plan may let layers keep activations.

    Tiles are there to hold less, and a second backward needs what the first used up. Layers without
    attention, or with one that families take apart, hold what no rule here predicts.
    """
    attention = [layer.attention for layer in search.workload.model.structures]
    known = all(shape is not None and not shape.score_bytes for shape in attention)
    measured = search.profile.source != NOT_MEASURED
    whole = tile_of(search.workload, settings) is None and not goes_back_twice(settings)
    return known and measured and whole


def layers_that_keep(workload: Workload, settings: StepSettings) -> tuple[BlockShape, ...]:
    """Return the layers whose activations stay on the device: the top ones, if trained."""
    model = workload.model
    lowest = next(i for i, block in enumerate(model.blocks) if block.is_trained)
    first = max(lowest - 1, model.num_layers - settings.kept_layers, 0)
    return model.layers[first:]


def kept_bytes(block: BlockShape, workload: Workload, tokens: int) -> float:
    """Return what the graph of a layer holds of a micro-batch, its input included."""
    width = workload.element_bytes
    per_token, _ = kept_per_token(block, workload, tokens)
    # What only the gradient of a matrix needs is kept for matrices that are trained, or adapted.
    frozen = block.num_experts > 0 and not any(
        t.role == "experts" for t in block.trained_part.tensors
    )
    per_token += (3 if frozen else 4) * width * block.inner
    if block.num_experts:  # rows sorted by expert, and their results
        rows = 1 if frozen else 2
        per_token += rows * width * block.experts_per_token * workload.model.hidden
    return tokens * per_token


def kept_total(workload: Workload, settings: StepSettings) -> float:
    """Return the activations that stay, of all micro-batches, and the output of the last layer."""
    kept = layers_that_keep(workload, settings)
    if not kept:
        return 0.0
    sizes = workload.micro_sizes(settings.micro_batch_tokens)
    by_layer = {
        layer: sum(sizes.count(size) * kept_bytes(layer, workload, size) for size in set(sizes))
        for layer in set(kept)
    }
    output = sum(sizes) * workload.model.hidden * workload.element_bytes
    return sum(by_layer[layer] for layer in kept) + output
