"""Frozen params in a model that is known by its sizes alone.

Patterns are those of `model.frozen`, over names as the model's own code gives them. A shape knows
the names of matrices and tables; its norms are numbered, so a pattern for a norm finds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from megatrain.errors import ConfigError
from megatrain.planning.model.shapes import BlockShape, ModelShape


def with_frozen(model: ModelShape, patterns: Sequence[str]) -> ModelShape:
    """Return the model with the params that match frozen. Raises ConfigError if none matches."""
    matched: set[str] = set()
    structures: list[BlockShape] = []
    kinds = []
    for number, layer in enumerate(model.layers):
        frozen = _frozen(layer, f"model.layers.{number}.", patterns, matched)
        if frozen not in structures:
            structures.append(frozen)
        kinds.append(structures.index(frozen))
    found = replace(
        model,
        embedding=_frozen(model.embedding, "model.", patterns, matched),
        structures=tuple(structures),
        layer_kinds=tuple(kinds),
        head=_frozen(model.head, "model.", patterns, matched),
    )
    for pattern in patterns:
        if pattern not in matched:
            raise ConfigError(
                f"model.frozen: {pattern[:100]} matches none of the known parameters of "
                f"{model.name}. For an exact match, give the model's folder instead of its name"
            )
    return found


def _frozen(
    block: BlockShape, prefix: str, patterns: Sequence[str], matched: set[str]
) -> BlockShape:
    tensors = []
    for tensor in block.tensors:
        name = tensor.name if tensor.name.startswith("lm_head") else f"{prefix}{tensor.name}"
        found = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
        matched |= found
        tensors.append(replace(tensor, trained=tensor.trained and not found))
    return replace(block, tensors=tuple(tensors))
