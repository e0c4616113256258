"""The shape of a decoder, tensor by tensor.

Sizes are those of its params; attention, windows and experts follow from the fields of its config.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from megatrain.planning.model.shapes import (
    AttentionShape,
    BlockShape,
    ModelShape,
    ParamRole,
    TensorShape,
)

if TYPE_CHECKING:
    from megatrain.models.decoder import Decoder


def shape_of(decoder: Decoder, name: str = "") -> ModelShape:
    """Return the shape of a decoder, tensor by tensor."""
    from megatrain.models.decoder import has_experts
    from megatrain.models.documents import by_document
    from megatrain.models.isolation import packing_family, why_mixed

    config = decoder.config
    packed_as = packing_family(config)
    facts = dict(decoder.text_config.to_dict())
    first, *layers, last = decoder.blocks
    structures, kinds = list[BlockShape](), list[int]()
    windows = _layer_windows(facts, len(layers))
    table = decoder.model.get_input_embeddings().weight
    hidden = int(facts.get("hidden_size") or table.shape[1])
    fused = getattr(decoder.model, "_supports_sdpa", True)
    for window, block in zip(windows, layers, strict=True):
        prefix = f"{decoder.layers_path}.{block.index - 1}."
        structure = _structure(block.params, prefix, facts, window, hidden, fused=fused)
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
        pages=has_experts(decoder.model) or not any(layer.num_experts for layer in structures),
        positions=_declared_positions(facts),
        logit_copies=_logit_copies(facts),
        carried_params=sum(param.num_elements for param in decoder.carried),
        tiled=not decoder.passes_more,
        passed_width=_passed_width(facts, len(layers)) if decoder.passes_more else 0,
    )


def _passed_width(facts: dict[str, Any], num_layers: int) -> int:
    """Return how many numbers per token layers get: their embeddings, shared keys and values."""
    looked_up = num_layers * int(facts.get("hidden_size_per_layer_input") or 0)
    if not facts.get("num_kv_shared_layers"):
        return looked_up
    attention = _attention_of(facts, None, fused=True)
    kinds = len(set(facts.get("layer_types") or [None]))
    return looked_up + kinds * attention.kv_heads * (attention.head_dim + attention.value_dim)


def _structure(
    params: Iterable[Any],
    prefix: str,
    facts: dict[str, Any],
    window: int | None,
    hidden: int,
    *,
    fused: bool,
) -> BlockShape:
    tensors = tuple(_tensor(param, prefix, None) for param in params)
    has_experts = any(tensor.role == "experts" for tensor in tensors)
    experts = _expert_counts(facts) if has_experts else (0, 0)
    return BlockShape(
        tensors=tensors,
        attention=_attention_of(facts, window, fused=fused),
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
        role=role if role and len(param.shape) > 1 else _role_of(name, param.shape),
        fp32=str(param.dtype) == "torch.float32",
        trained=param.trained,
        adapts=_half(name),
        form=param.form,
    )


_OUTWARD = ("down_proj", "mlp.c_proj", "fc2", "dense_4h_to_h", "fc_out")
"""How families call the matrix that leads out of the feed-forward."""


def _half(name: str) -> Literal["", "in", "out"]:
    """Return which half of an adapter a param is."""
    if name.endswith("lora_A"):
        return "in"
    return "out" if name.endswith("lora_B") else ""


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


def _role_of(name: str, shape: tuple[int, ...]) -> ParamRole:
    """Return the use of a layer's param; biases of experts only look like matrices."""
    if "experts" in name and "shared" not in name and len(shape) > 1:
        return "experts"
    return "matrix" if len(shape) == 2 else "vector"


def _declared_positions(facts: dict[str, Any]) -> int | None:
    """Return the longest row that the model was made for; None where its config has none."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    found = (facts[name] for name in names if isinstance(facts.get(name), int))
    return next(found, None)


def _expert_counts(facts: dict[str, Any]) -> tuple[int, int]:
    """Return how many experts a layer has and how many of them a token uses."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count = next((int(facts[name]) for name in names if facts.get(name)), 0)
    used = ("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_top_k", "top_k_experts")
    return count, next((int(facts[name]) for name in used if facts.get(name)), 1)


def _logit_copies(facts: dict[str, Any]) -> int:
    """Return how many copies of its logits a model's own way with them holds while they go back."""
    if facts.get("final_logit_softcapping"):
        return 5  # tanh, its product, the product's gradient, and those of both
    scales = ("logit_scale", "logits_scaling", "lm_head_multiplier")
    return 3 if any(facts.get(name) not in (None, 1) for name in scales) else 0


def _attention_of(facts: dict[str, Any], window: int | None, *, fused: bool) -> AttentionShape:
    """Return the attention that a config's dimensions describe.

    `fused`: transformers has a fused kernel for the family. Soft caps and sinks have none.
    """
    heads = int(facts.get("num_attention_heads") or facts.get("n_head") or 1)
    hidden = int(facts.get("hidden_size") or facts.get("n_embd") or heads)
    kv_heads = int(facts.get("num_key_value_heads") or heads)
    if facts.get("kv_lora_rank"):
        head_dim = int(facts["qk_nope_head_dim"]) + int(facts["qk_rope_head_dim"])
        return AttentionShape(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            value_dim=int(facts["v_head_dim"]),
            window=window,
        )
    head_dim = int(facts.get("head_dim") or hidden // heads)
    return AttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        window=window,
        score_bytes=0 if fused else 13 if facts.get("attn_logit_softcapping") else 8,
    )


_PERIODS = {
    "gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4, "olmo3": 4, "exaone4": 4,
    "llama4_text": 4,
}  # fmt: skip
"""Every so-many-th layer sees all tokens, where a config does not list its layers."""


def _layer_windows(facts: dict[str, Any], num_layers: int) -> list[int | None]:
    """Return the window of each layer."""
    window = facts.get("sliding_window") or facts.get("attention_chunk_size")
    if not window or facts.get("use_sliding_window") is False:
        return [None] * num_layers
    types = facts.get("layer_types")
    if isinstance(types, list | tuple) and len(types) == num_layers:
        full = [kind == "full_attention" for kind in types]
    elif default := _PERIODS.get(str(facts.get("model_type"))):
        period = int(facts.get("sliding_window_pattern") or default)
        full = [(layer + 1) % period == 0 for layer in range(num_layers)]
    else:
        full = [False] * num_layers
    return [None if is_full else int(window) for is_full in full]
