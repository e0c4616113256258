"""Which features a step has, and the order of their passes.

Laws (tests/features/test_registry.py)
    1. Two passes that do not commute are in ORDER as the test says, with the reason.
    2. Each list is the same whatever the order of passes that commute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from megatrain.engine.features import Feature
from megatrain.features import optional
from megatrain.step import schedule
from megatrain.step.ops import Op, Resource
from megatrain.step.passes import Pass
from megatrain.step.program import Fetches
from megatrain.step.shape import StepShape


class Entry(NamedTuple):
    """A pass, and when a step has it."""

    name: str
    is_on: Callable[[StepShape], bool]
    make: Callable[[StepShape], Pass]


ORDER = (
    # What is computed.
    Entry(
        "two_backward_passes",
        lambda shape: shape.update == "second_backward",
        lambda shape: optional.two_backward_passes.TwoBackwardPasses(),
    ),
    Entry(
        "saved_activations",
        lambda shape: shape.kept_layers > 0,
        lambda shape: optional.saved_activations.SavedActivations(shape.kept_layers),
    ),
    # Of the plain step. It serves whatever order of compute there is.
    Entry("fetches", lambda shape: True, lambda shape: Fetches()),
    Entry(
        "expert_pages",
        lambda shape: shape.pages,
        lambda shape: optional.expert_pages.ExpertPages(),
    ),
    Entry(
        "embedding_rows",
        lambda shape: shape.gather_embedding,
        lambda shape: optional.embedding_rows.EmbeddingRows(),
    ),
    Entry(
        "tied_embeddings",
        lambda shape: shape.tied,
        lambda shape: optional.tied_embeddings.TiedEmbeddings(),
    ),
    # What moves. Who puts something in first is further from the op that it is put around.
    Entry(
        "activation_offload",
        lambda shape: shape.tape == "host",
        lambda shape: optional.activation_offload.ActivationOffload(shape.tape_slots),
    ),
    Entry(
        "router_loss",
        lambda shape: shape.balances,
        lambda shape: optional.router_loss.RouterLoss(among_ranks=shape.divided),
    ),
    Entry(
        "muon",
        lambda shape: any(shape.matrices),
        lambda shape: optional.muon.Muon(frozenset(shape.matrix_blocks)),
    ),
    Entry(
        "disk_offload",
        lambda shape: shape.tier != "none",
        lambda shape: optional.disk_offload.DiskOffload(shape.tier_slots),
    ),
    Entry("sharding", lambda shape: shape.divided, lambda shape: optional.sharding.Sharding()),
    Entry(
        "unified_memory",
        lambda shape: not shape.copying,
        lambda shape: optional.unified_memory.UnifiedMemory(),
    ),
)
"""All passes, in their order."""


def passes_of(shape: StepShape) -> list[Pass]:
    """Return the passes of a step, in their order."""
    return [entry.make(shape) for entry in ORDER if entry.is_on(shape)]


def features_of(shape: StepShape) -> list[Feature]:
    """Return the features of a step, in the order of their passes."""
    return [one for one in passes_of(shape) if isinstance(one, Feature)]


def build_ops(kind: str, shape: StepShape) -> list[Op]:
    """Return the ops of a step with its features: see step/schedule.py."""
    return schedule.build_ops(kind, shape, passes_of(shape))


def places_of(shape: StepShape) -> Mapping[Resource, Resource]:
    """Return where the things of a step are (step/ops.py)."""
    return schedule.steady_step(shape, passes_of(shape)).places
