"""Shapes of which a part is trained: adapters over a frozen model, or params that are frozen.

Adapters as models/adapters/lora.py makes them in a skeleton: beside each linear module of the
layers that is a target there are a matrix of rank x in and one of out x rank, and nothing else is
trained. Routers, norms and experts that share one tensor are not linear modules. Patterns are those
of `model.frozen`, over the names that the model's own code gives its params.

Law (tests/planning/model/test_partly_trained.py): shapes are those of the skeleton with the same
adapters, or the same frozen params.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from megatrain.config.sections import LoraSettings
from megatrain.errors import ConfigError
from megatrain.models.patterns import matches
from megatrain.planning.model.shapes import BlockShape, ModelShape, TensorShape

_NO_LINEAR = (".gate.weight", ".router.weight", "norm.weight")
"""Endings of the names of matrices that belong to no linear module: routers, norms of heads."""
_ALL = "all-linear"


def with_adapters(model: ModelShape, lora: LoraSettings) -> ModelShape:
    """Return the model with its adapters, and all else frozen.

    Raises ConfigError if a target matches nothing.
    """
    for target in lora.targets:
        if target != _ALL and not any(_targets(s, (target,)) for s in model.structures):
            raise ConfigError(
                f"lora.targets: {target[:100]} matches none of the known matrices of {model.name}. "
                "For an exact match, give the model's folder instead of its name"
            )
    return replace(
        model,
        embedding=_all_frozen(model.embedding),
        structures=tuple(_adapted(structure, lora) for structure in model.structures),
        head=_all_frozen(model.head),
    )


def _adapted(block: BlockShape, lora: LoraSettings) -> BlockShape:
    assert lora.rank is not None
    added = []
    for tensor in _targets(block, lora.targets):
        name, (wide, narrow) = tensor.name.removesuffix(".weight"), tensor.shape
        halves = {"lora_A": (lora.rank, narrow), "lora_B": (wide, lora.rank)}
        added += [
            TensorShape(
                name=f"{name}.{half}",
                shape=shape,
                role=tensor.role,
                adapts="in" if half == "lora_A" else "out",
            )
            for half, shape in halves.items()
        ]
    frozen = _all_frozen(block)
    return replace(frozen, tensors=(*frozen.tensors, *added), drops=lora.dropout > 0)


def _targets(block: BlockShape, targets: tuple[str, ...]) -> list[TensorShape]:
    """Return the weights of the modules that are adapted."""
    return [
        tensor
        for tensor in _linear(block)
        if not targets or _ALL in targets or _is_target(tensor, targets)
    ]


def _is_target(tensor: TensorShape, targets: tuple[str, ...]) -> bool:
    module = f"model.layers.0.{tensor.name.removesuffix('.weight')}"
    return matches(module, [*targets, *(f"*.{target}" for target in targets)])


def _linear(block: BlockShape) -> Iterator[TensorShape]:
    for tensor in block.tensors:
        is_weight = tensor.role == "matrix" and tensor.name.endswith(".weight")
        if is_weight and len(tensor.shape) == 2 and not tensor.name.endswith(_NO_LINEAR):
            yield tensor


def _all_frozen(block: BlockShape) -> BlockShape:
    return replace(block, tensors=tuple(replace(t, trained=False) for t in block.tensors))


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
        embedding=_frozen(model.embedding, "", patterns, matched),
        structures=tuple(structures),
        layer_kinds=tuple(kinds),
        head=_frozen(model.head, "", patterns, matched),
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
        name = f"{prefix}{tensor.name}"
        found = {pattern for pattern in patterns if fnmatchcase(name, pattern)}
        matched |= found
        tensors.append(replace(tensor, trained=tensor.trained and not found))
    return replace(block, tensors=tuple(tensors))
