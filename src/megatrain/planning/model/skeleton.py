"""The shape of a decoder, tensor by tensor.

Law (tests/planning/catalog/test_families.py): tensors from dimensions are those found here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from megatrain.planning.model.dimensions import (
    attention_of,
    declared_positions,
    expert_counts,
    layer_windows,
    logit_copies,
    role_of,
)
from megatrain.planning.model.shapes import BlockShape, ModelShape, ParamRole, TensorShape

if TYPE_CHECKING:
    from megatrain.models.decoder import Decoder


def shape_of(decoder: Decoder, name: str = "") -> ModelShape:
    """Return the shape of a decoder, tensor by tensor."""
    from megatrain.models.documents import by_document
    from megatrain.models.isolation import packing_family, why_mixed

    config = decoder.config
    packed_as = packing_family(config)
    facts = dict(decoder.text_config.to_dict())
    first, *layers, last = decoder.blocks
    structures, kinds = list[BlockShape](), list[int]()
    windows = layer_windows(facts, len(layers))
    table = decoder.model.get_input_embeddings().weight
    hidden = int(facts.get("hidden_size") or table.shape[1])
    for window, block in zip(windows, layers, strict=True):
        prefix = f"{decoder.layers_path}.{block.index - 1}."
        structure = _structure(block.params, prefix, facts, window, hidden)
        structure = replace(
            structure, drops=bool(decoder.adapters and decoder.adapters.lora.dropout)
        )
        if structure not in structures:
            structures.append(structure)
        kinds.append(structures.index(structure))
    return ModelShape(
        name=name or str(config.model_type),
        family=str(config.model_type),
        vocab=int(table.shape[0]),
        hidden=hidden,
        embedding=BlockShape(tensors=tuple(_tensor(p, "", "table") for p in first.params)),
        structures=tuple(structures),
        layer_kinds=tuple(kinds),
        head=BlockShape(tensors=tuple(_tensor(param, "", None) for param in last.params)),
        tied=decoder.tied,
        by_document=by_document(config),
        packs=why_mixed(packed_as) is None,
        packs_by_lengths=why_mixed(packed_as, "flash_attention_2") is None,
        positions=declared_positions(facts),
        logit_copies=logit_copies(facts),
        carried_params=sum(param.num_elements for param in decoder.carried),
    )


def _structure(
    params: Iterable[Any], prefix: str, facts: dict[str, Any], window: int | None, hidden: int
) -> BlockShape:
    tensors = tuple(_tensor(param, prefix, None) for param in params)
    has_experts = any(tensor.role == "experts" for tensor in tensors)
    experts = expert_counts(facts) if has_experts else (0, 0)
    return BlockShape(
        tensors=tensors,
        attention=attention_of(facts, window),
        inner=_inner_width(tensors, experts, hidden),
        gated=_is_gated(tensors),
        num_experts=experts[0],
        experts_per_token=experts[1],
    )


def _tensor(param: Any, prefix: str, role: ParamRole | None) -> TensorShape:
    name = param.name.removeprefix(prefix)
    return TensorShape(
        name=name,
        shape=tuple(param.shape),
        role=role if role and len(param.shape) > 1 else role_of(name, param.shape),
        fp32=str(param.dtype) == "torch.float32",
        trained=param.trained,
        adapts=_half(name),
    )


_OUTWARD = ("down_proj", "mlp.c_proj", "fc2", "dense_4h_to_h", "fc_out")
"""How families call the matrix that leads out of the feed-forward."""


def _half(name: str) -> Literal["", "in", "out"]:
    """Return which half of an adapter a param is."""
    if name.endswith(".lora_A"):
        return "in"
    return "out" if name.endswith(".lora_B") else ""


def _leads_out(tensor: TensorShape) -> bool:
    return (
        any(name in tensor.name for name in _OUTWARD)
        and "bias" not in tensor.name
        and not tensor.adapts
    )


def _inner_width(tensors: Iterable[TensorShape], experts: tuple[int, int], hidden: int) -> int:
    width = 0
    for tensor in filter(_leads_out, tensors):
        among, used = experts if tensor.role == "experts" else (1, 1)
        width += tensor.num_elements * used // (among * hidden)
    return width


def _is_gated(tensors: Iterable[TensorShape]) -> bool:
    """Return whether two matrices, or one of twice the size, lead into the feed-forward."""
    inside = [tensor for tensor in tensors if "att" not in tensor.name and not tensor.adapts]
    outward = sum(tensor.num_elements for tensor in inside if _leads_out(tensor))
    return sum(tensor.num_elements for tensor in inside) > 2.5 * outward
