"""Adapters of a model that is known by its sizes alone.

As models/adapters/lora.py does to a skeleton: beside each linear module of the layers that is a
target there are a matrix of rank x in and one of out x rank, and nothing else is trained. Routers
and experts that share one tensor are not linear modules.

Law (tests/planning/catalog/test_adapting.py): the adapters are those of the real skeleton, size for
size, for every family in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatrain.config.sections import LoraSettings
from megatrain.errors import ConfigError
from megatrain.models.patterns import matches
from megatrain.planning.model.shapes import BlockShape, ModelShape, TensorShape

_ROUTER = "mlp.gate.weight"
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
        embedding=_frozen(model.embedding),
        structures=tuple(_adapted(structure, lora) for structure in model.structures),
        head=_frozen(model.head),
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
    frozen = _frozen(block)
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
        if is_weight and len(tensor.shape) == 2 and tensor.name != _ROUTER:
            yield tensor


def _frozen(block: BlockShape) -> BlockShape:
    return replace(block, tensors=tuple(replace(t, trained=False) for t in block.tensors))
