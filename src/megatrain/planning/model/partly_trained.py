"""Shapes of which a part is trained: adapters over a frozen model, or params that are frozen.

Adapters as models/adapters/lora.py makes them in a skeleton: beside each linear module of the
layers that is a target there are a matrix of rank x in and one of out x rank, and nothing else is
trained. Routers, norms and experts that share one tensor are not linear modules. Beside such
experts, where they are asked for, two matrices have as many ranks for each of them. Patterns are
those of `model.frozen`, over the names that the model's own code gives its params.

Law (tests/planning/model/test_partly_trained.py): shapes are those of the skeleton with the same
adapters, or the same frozen params.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

from megatrain.choices import ALL_EXPERTS, ALL_LINEAR, BaseForm
from megatrain.config.sections import LoraSettings
from megatrain.errors import ConfigError
from megatrain.models.patterns import ends_like
from megatrain.narrow import Form, nf4_on_load, published
from megatrain.planning.model.shapes import BlockShape, ModelShape, ParamRole, TensorShape
from megatrain.quantization import Quantization

_NO_LINEAR = (".gate.weight", ".router.weight", "norm.weight")
"""Endings of the names of matrices that belong to no linear module: routers, norms of heads."""
_TRANSPOSED = ("aria_text", "gpt_oss")
"""Families whose experts are (experts, in, out)."""


def with_adapters(model: ModelShape, lora: LoraSettings) -> ModelShape:
    """Return the model with its adapters, and all else frozen.

    Raises ConfigError if a target, or a name of experts or ranks, matches nothing.
    """
    _refuse_unmatched(model, lora)
    structures: list[BlockShape] = []
    kinds = []
    for number, layer in enumerate(model.layers):
        adapted = _adapted(layer, lora, model.family, f"model.layers.{number}.")
        if adapted not in structures:
            structures.append(adapted)
        kinds.append(structures.index(adapted))
    return replace(
        model,
        embedding=_saved(model.embedding, lora),
        structures=tuple(structures),
        layer_kinds=tuple(kinds),
        head=_saved(model.head, lora),
    )


def _refuse_unmatched(model: ModelShape, lora: LoraSettings) -> None:
    linear, experts, adapted = set[str](), set[str](), set[str]()
    for number, layer in enumerate(model.layers):
        prefix = f"model.layers.{number}."
        linear |= {_module(prefix, tensor) for tensor in _linear(layer)}
        experts |= {f"{prefix}{tensor.name}" for tensor in _experts(layer)}
        adapted |= {name for name, _ in _chosen(layer, lora, prefix)}
    # The module of experts is a target that adds nothing: linear modules are left out with it.
    modules = linear | {name.rpartition(".")[0] for name in experts if lora.experts}
    for target in lora.targets:
        if target != ALL_LINEAR and not any(ends_like(name, [target]) for name in modules):
            raise ConfigError(
                f"lora.targets: {target[:100]} matches none of the known matrices of {model.name}. "
                "For an exact match, give the model's folder instead of its name"
            )
    for name in lora.experts:
        if not experts or (
            name != ALL_EXPERTS and not any(ends_like(found, [name]) for found in experts)
        ):
            raise ConfigError(
                f"lora.experts: {model.name} has no experts in one tensor that {name[:100]} "
                "matches, as far as its name tells. For an exact match, give the model's folder"
            )
    for pattern in (*lora.rank_pattern, *lora.alpha_pattern):
        if not any(ends_like(name, [pattern]) for name in adapted):
            raise ConfigError(
                f"lora: {pattern[:100]} in rank_pattern or alpha_pattern matches nothing that is "
                f"adapted in {model.name}, as far as its name tells"
            )


def _chosen(
    block: BlockShape, lora: LoraSettings, prefix: str
) -> Iterator[tuple[str, TensorShape]]:
    """Yield what is adapted in a layer: a module's name with its weight, or a param's."""
    for tensor in _linear(block):
        name = _module(prefix, tensor)
        if not lora.targets or ALL_LINEAR in lora.targets or ends_like(name, lora.targets):
            yield name, tensor
    for tensor in _experts(block):
        name = f"{prefix}{tensor.name}"
        if ALL_EXPERTS in lora.experts or ends_like(name, lora.experts):
            yield name, tensor


def _adapted(block: BlockShape, lora: LoraSettings, family: str, prefix: str) -> BlockShape:
    assert lora.rank is not None
    added = []
    for name, tensor in _chosen(block, lora, prefix):
        found = (rank for p, rank in lora.rank_pattern.items() if ends_like(name, [p]))
        ranks, (wide, narrow), mark = next(found, lora.rank), tensor.shape[-2:], "."
        if len(tensor.shape) == 3:
            ranks, mark = ranks * tensor.shape[0], "_"
            wide, narrow = (narrow, wide) if family in _TRANSPOSED else (wide, narrow)
        parts: dict[str, tuple[tuple[int, ...], ParamRole, Literal["", "in", "out"]]] = {
            "lora_A": ((ranks, narrow), tensor.role, "in"),
            "lora_B": ((wide, ranks), tensor.role, "out"),
        }
        if lora.dora:
            parts["lora_magnitude_vector"] = ((wide,), "vector", "")
        added += [
            TensorShape(
                name=f"{name.removeprefix(prefix)}{mark}{part}",
                shape=shape,
                role=role,
                adapts=adapts,
                fp32=lora.dtype == "fp32" or role == "vector",
            )
            for part, (shape, role, adapts) in parts.items()
        ]
    frozen = _all_frozen(block)
    return replace(frozen, tensors=(*frozen.tensors, *added), drops=lora.dropout > 0)


def _saved(block: BlockShape, lora: LoraSettings) -> BlockShape:
    """Return the embedding or the head: frozen, but for modules that are trained whole."""
    return replace(
        block,
        tensors=tuple(
            replace(tensor, trained=ends_like(tensor.name.rpartition(".")[0], lora.modules_to_save))
            for tensor in block.tensors
        ),
    )


def _module(prefix: str, weight: TensorShape) -> str:
    return f"{prefix}{weight.name.removesuffix('.weight')}"


def _experts(block: BlockShape) -> list[TensorShape]:
    """Return the params that have a matrix for each expert."""
    return [t for t in block.tensors if t.role == "experts" and len(t.shape) == 3]


def _linear(block: BlockShape) -> Iterator[TensorShape]:
    for tensor in block.tensors:
        is_weight = tensor.role == "matrix" and tensor.name.endswith(".weight")
        if is_weight and len(tensor.shape) == 2 and not tensor.name.endswith(_NO_LINEAR):
            yield tensor


def _all_frozen(block: BlockShape) -> BlockShape:
    return replace(block, tensors=tuple(replace(t, trained=False) for t in block.tensors))


def with_base(model: ModelShape, base: BaseForm) -> ModelShape:
    """Return a model with adapters whose frozen linear modules and experts have a narrow form.

    Matrices are those of the model's own params; a folder may have them in parts.
    """
    published_as = model.published
    if base == "auto":
        base = "as_published"
    if base == "bf16" or (base == "as_published" and published_as is None):
        return model
    structures = tuple(_narrow(structure, base, published_as) for structure in model.structures)
    return replace(model, structures=structures)


def _narrow(block: BlockShape, base: BaseForm, how: Quantization | None) -> BlockShape:
    linear = {tensor.name for tensor in _linear(block)}

    def form(tensor: TensorShape) -> Form:
        is_expert = tensor.role == "experts" and len(tensor.shape) == 3
        if tensor.trained or tensor.adapts or not (is_expert or tensor.name in linear):
            return ()
        if base != "as_published":
            return (nf4_on_load(tensor.shape),)
        assert how is not None
        found = published(tensor.shape, how.method, how.block)
        return () if found is None else (found,)

    return replace(block, tensors=tuple(replace(t, form=form(t)) for t in block.tensors))


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
