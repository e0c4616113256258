"""What a feature may do to the engine, and the one place where the engine finds its features.

A feature (megatrain/features) is a layer above the engine, which knows this interface alone. The
shape of a step says which features are on, so the engine asks the registry for those of its shape:
one import, by name, and never of a feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from megatrain.step.ops import Op, OpKind, Resource
from megatrain.step.passes import Pass
from megatrain.step.shape import StepShape

if TYPE_CHECKING:
    from megatrain.engine.actions import StepActions
    from megatrain.lanes.lane import Action


class Feature(Pass):
    """A feature of a step: a pass over its list, and the actions of what that puts in."""

    def actions(self, step: StepActions, table: Mapping[OpKind, Action]) -> Mapping[OpKind, Action]:
        """Return the actions of its own kinds of op, and those of `table` that it wraps."""
        return {}


class Registry(Protocol):
    """Knows all features (features/registry.py)."""

    def features_of(self, shape: StepShape) -> Sequence[Feature]:
        """Return the features of a step, in the order of their passes."""

    def build_ops(self, kind: str, shape: StepShape) -> list[Op]:
        """Return a list of ops (step/schedule.py) with all features of the shape."""

    def places_of(self, shape: StepShape) -> Mapping[Resource, Resource]:
        """Return where the things of a step are (step/ops.py)."""


def registry() -> Registry:
    return cast(Registry, import_module("megatrain.features.registry"))
