"""From the dimensions in a `config.json` to the tensors of the model: the usual decoder families.

A family is a set of differences from the plain one: a gated feed-forward, two norms, no biases, an
attention with separate projections. No torch and no transformers, so that an estimate answers at
once; for a family that is not here the exact way through the model's own skeleton remains.

Laws (tests/planning/catalog/test_families.py)
    1. The tensors are those of the real skeleton, size for size, for every family in FAMILIES.
    2. A family that is not known, or a dimension that is not there, is a ModelConfigError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatrain.errors import ModelConfigError
from megatrain.planning.model.dimensions import (
    attention_of,
    declared_positions,
    expert_counts,
    layer_windows,
    logit_copies,
    role_of,
)
from megatrain.planning.model.shapes import BlockShape, ModelShape, TensorShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What sets a family apart."""

    norms: int = 2
    """Norms of the hidden width in a layer."""
    norm_bias: bool = False
    qk_norm: Literal["", "head", "full"] = ""
    """Norms of queries and keys: as wide as a head, or as all heads."""
    qk_norm_asked: bool = False
    """Only if the config has `use_qk_norm`."""
    qkv_bias: bool = False
    o_bias: bool = False
    attention_bias: bool = False
    """`attention_bias` of the config adds biases to q, k and v ..."""
    attention_bias_o: bool = False
    """... and to the output."""
    mlp_bias: bool = False
    """Always; the plain one asks `mlp_bias` of the config."""
    gated: bool = True
    fused_qkv: bool = False
    """One matrix for q, k and v."""
    fused_mlp: bool = False
    """One matrix for gate and up."""
    sinks: bool = False
    by_document: bool = True
    """Packed documents are attended to one by one, without a mask for the row."""
    packs: bool = True
    """Documents of a packed row are kept apart ..."""
    packs_by_lengths: bool = True
    """... and so they are with flash attention, which takes their lengths."""
    tied: bool = False
    """Unless the config sets another value."""
    head_bias: bool = False
    moe: Literal["", "all", "after", "every"] = ""
    """Which layers have experts: all, those after the first dense ones, or every so-many-th."""
    expert_bias: bool = False
    shared_gate: bool = False
    mla: bool = False


_PLAIN = Family()
FAMILIES: dict[str, Family] = {
    "llama": replace(_PLAIN, attention_bias=True, attention_bias_o=True),
    "mistral": _PLAIN,
    "qwen2": replace(_PLAIN, qkv_bias=True),
    "qwen3": replace(_PLAIN, qk_norm="head", attention_bias=True, attention_bias_o=True),
    "gemma": replace(_PLAIN, tied=True, attention_bias=True, attention_bias_o=True),
    "gemma2": replace(_PLAIN, norms=4, tied=True, attention_bias=True, attention_bias_o=True),
    "gemma3_text": replace(
        _PLAIN, norms=4, qk_norm="head", tied=True, attention_bias=True, attention_bias_o=True
    ),
    "phi": replace(
        _PLAIN, norms=1, norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True, gated=False,
        head_bias=True,
    ),
    "phi3": replace(_PLAIN, fused_qkv=True, fused_mlp=True),
    "mixtral": replace(_PLAIN, moe="all"),
    "qwen2_moe": replace(_PLAIN, qkv_bias=True, moe="every", shared_gate=True),
    "qwen3_moe": replace(
        _PLAIN, qk_norm="head", attention_bias=True, attention_bias_o=True, moe="every"
    ),
    "gpt_oss": replace(
        _PLAIN, qkv_bias=True, o_bias=True, sinks=True, moe="all", expert_bias=True
    ),
    "olmoe": replace(
        _PLAIN, qk_norm="full", attention_bias=True, attention_bias_o=True, moe="all"
    ),
    "deepseek_v2": replace(_PLAIN, moe="after", mla=True),
    "deepseek_v3": replace(_PLAIN, moe="after", mla=True),
    "glm4": replace(_PLAIN, norms=4, attention_bias=True, fused_mlp=True),
    "glm4_moe": replace(
        _PLAIN, qk_norm="head", qk_norm_asked=True, attention_bias=True, moe="after"
    ),
    "olmo2": replace(_PLAIN, qk_norm="full", attention_bias=True, attention_bias_o=True),
    "olmo3": replace(_PLAIN, qk_norm="full", attention_bias=True, attention_bias_o=True),
    "smollm3": replace(_PLAIN, tied=True, attention_bias=True, attention_bias_o=True),
    "granite": replace(_PLAIN, attention_bias=True, attention_bias_o=True),
    "cohere": replace(
        _PLAIN, norms=1, qk_norm="full", qk_norm_asked=True, tied=True, attention_bias=True,
        attention_bias_o=True,
    ),
    "cohere2": replace(_PLAIN, norms=1, tied=True, attention_bias=True, attention_bias_o=True),
    "starcoder2": replace(
        _PLAIN, norm_bias=True, qkv_bias=True, o_bias=True, mlp_bias=True, gated=False, tied=True
    ),
    "exaone4": replace(_PLAIN, qk_norm="head"),
    "seed_oss": replace(_PLAIN, attention_bias=True),
    "nemotron": replace(
        _PLAIN, norm_bias=True, gated=False, attention_bias=True, attention_bias_o=True,
        packs_by_lengths=False,
    ),
    "llama4_text": replace(
        _PLAIN, attention_bias=True, attention_bias_o=True, moe="every", by_document=False,
        packs=False, packs_by_lengths=False,
    ),
}  # fmt: skip
_MAX_LAYERS = 256
ALIASES = {"kimi_k2": "deepseek_v3"}
"""Names that transformers does not know of families that it does."""


def shape_from_config(fields: Mapping[str, Any], name: str = "") -> ModelShape:
    """Return the shape of the model that a config's dimensions describe.

    A config of several parts is taken for its text part. Raises ModelConfigError.
    """
    facts = dict(fields)
    if isinstance(inner := facts.get("text_config"), Mapping):
        facts = {**inner}
    family_name = str(facts.get("model_type"))
    facts["model_type"] = family_name = ALIASES.get(family_name, family_name)
    family = FAMILIES.get(family_name)
    if family is None:
        raise ModelConfigError(
            f"model_type {family_name[:80]!r}: its tensors do not follow from dimensions alone. "
            f"Known families: {', '.join(sorted(FAMILIES))}"
        )
    try:
        return _shape(facts, family, name or family_name)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelConfigError(
            f"config of a {family_name}: a dimension is missing or not a number: {error}"
        ) from None


def _shape(facts: dict[str, Any], family: Family, name: str) -> ModelShape:
    hidden, vocab = int(facts["hidden_size"]), int(facts["vocab_size"])
    num_layers = int(facts["num_hidden_layers"])
    if not (0 < num_layers <= _MAX_LAYERS and min(hidden, vocab) > 0):
        raise ValueError(f"{num_layers} layers of width {hidden}, {vocab} tokens")
    tied = bool(facts.get("tie_word_embeddings", family.tied))
    structures: list[BlockShape] = []
    kinds = []
    for layer, window in enumerate(layer_windows(facts, num_layers)):
        structure = _layer(facts, family, layer, window)
        if structure not in structures:
            structures.append(structure)
        kinds.append(structures.index(structure))
    table = TensorShape(name="embed_tokens.weight", shape=(vocab, hidden), role="table")
    head = [*_norm("norm", hidden, family)]
    if not tied:
        head.append(TensorShape(name="lm_head.weight", shape=(vocab, hidden), role="matrix"))
    if family.head_bias:
        head.append(TensorShape(name="lm_head.bias", shape=(vocab,)))
    return ModelShape(
        name=name,
        family=str(facts["model_type"]),
        vocab=vocab,
        hidden=hidden,
        embedding=BlockShape(tensors=(table,)),
        structures=tuple(structures),
        layer_kinds=tuple(kinds),
        head=BlockShape(tensors=tuple(head)),
        tied=tied,
        by_document=family.by_document,
        packs=family.packs,
        packs_by_lengths=family.packs_by_lengths,
        positions=declared_positions(facts),
        logit_copies=logit_copies(facts),
    )


def _layer(facts: dict[str, Any], family: Family, layer: int, window: int | None) -> BlockShape:
    hidden = int(facts["hidden_size"])
    attention = (_latent_attention if family.mla else _attention)(facts, family)
    tensors = [*attention]
    has_experts = _has_experts(facts, family, layer)
    inner = 0
    if has_experts:
        experts, inner = _experts(facts, family)
        tensors += experts
    else:
        width = int(_first(facts, "intermediate_size_mlp", "intermediate_size"))
        tensors += _feed_forward("mlp", hidden, width, family, facts)
        inner = width
    for index in range(family.norms):
        tensors += _norm(f"norm_{index}", hidden, family)
    num_experts, per_token = expert_counts(facts)
    return BlockShape(
        tensors=tuple(tensors),
        attention=attention_of(facts, window),
        inner=inner,
        gated=family.gated,
        num_experts=num_experts if has_experts else 0,
        experts_per_token=per_token if has_experts else 0,
    )


def _has_experts(facts: dict[str, Any], family: Family, layer: int) -> bool:
    if family.moe == "after":
        return layer >= int(facts.get("first_k_dense_replace", 0))
    if family.moe == "every":
        step = int(facts.get("decoder_sparse_step") or facts.get("interleave_moe_layer_step") or 1)
        return (layer + 1) % step == 0 and layer not in (facts.get("mlp_only_layers") or ())
    return family.moe == "all"


def _attention(facts: dict[str, Any], family: Family) -> Iterator[TensorShape]:
    hidden = int(facts["hidden_size"])
    shape = attention_of(facts, None)
    queries, keys = shape.query_width, shape.kv_heads * shape.head_dim
    asked = bool(facts.get("attention_bias"))
    qkv_bias = family.qkv_bias or (family.attention_bias and asked)
    o_bias = family.o_bias or (family.attention_bias_o and asked)
    if family.fused_qkv:
        yield from _linear("self_attn.qkv_proj", queries + 2 * keys, hidden, qkv_bias)
    else:
        for letter, width in (("q", queries), ("k", keys), ("v", keys)):
            yield from _linear(f"self_attn.{letter}_proj", width, hidden, qkv_bias)
    yield from _linear("self_attn.o_proj", hidden, queries, o_bias)
    if family.sinks:
        yield TensorShape(name="self_attn.sinks", shape=(shape.heads,))
    if family.qk_norm and facts.get("use_qk_norm", not family.qk_norm_asked):
        full = family.qk_norm == "full"
        for letter, width in (("q", queries), ("k", keys)):
            size = width if full else shape.head_dim
            yield TensorShape(name=f"self_attn.{letter}_norm.weight", shape=(size,))


def _latent_attention(facts: dict[str, Any], family: Family) -> Iterator[TensorShape]:
    """Yield the tensors of attention through narrow queries, keys and values."""
    hidden, shape = int(facts["hidden_size"]), attention_of(facts, None)
    q_rank, kv_rank = facts.get("q_lora_rank"), int(facts["kv_lora_rank"])
    rope, nope = int(facts["qk_rope_head_dim"]), int(facts["qk_nope_head_dim"])
    bias = bool(facts.get("attention_bias"))
    if q_rank:
        yield from _linear("self_attn.q_a_proj", int(q_rank), hidden, bias)
        yield TensorShape(name="self_attn.q_a_layernorm.weight", shape=(int(q_rank),))
        yield from _linear("self_attn.q_b_proj", shape.query_width, int(q_rank), False)
    else:
        yield from _linear("self_attn.q_proj", shape.query_width, hidden, False)
    yield from _linear("self_attn.kv_a_proj_with_mqa", kv_rank + rope, hidden, bias)
    yield TensorShape(name="self_attn.kv_a_layernorm.weight", shape=(kv_rank,))
    width = shape.heads * (nope + shape.value_dim)
    yield from _linear("self_attn.kv_b_proj", width, kv_rank, False)
    yield from _linear("self_attn.o_proj", hidden, shape.heads * shape.value_dim, bias)


def _experts(facts: dict[str, Any], family: Family) -> tuple[list[TensorShape], int]:
    """Return router, experts and shared experts, and the width that a token computes."""
    hidden = int(facts["hidden_size"])
    width = int(_first(facts, "moe_intermediate_size", "intermediate_size"))
    count, per_token = expert_counts(facts)
    if not count:
        raise KeyError("num_experts")
    tensors = [*_linear("mlp.gate", count, hidden, family.expert_bias)]
    sizes = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
    for label, (rows, columns) in sizes.items():
        name = f"mlp.experts.{label}"
        tensors.append(TensorShape(name=name, shape=(count, rows, columns), role="experts"))
        if family.expert_bias:
            tensors.append(TensorShape(name=f"{name}_bias", shape=(count, rows), role="experts"))
    shared = _shared_width(facts, family, width)
    if shared:
        tensors += _feed_forward("mlp.shared_experts", hidden, shared, family, facts)
    if shared and family.shared_gate:
        tensors += _linear("mlp.shared_expert_gate", 1, hidden, False)
    return tensors, width * per_token + shared


def _shared_width(facts: dict[str, Any], family: Family, width: int) -> int:
    if facts.get("model_type") == "llama4_text":
        return int(facts["intermediate_size"])
    if facts.get("shared_expert_intermediate_size"):
        return int(facts["shared_expert_intermediate_size"])
    return int(facts.get("n_shared_experts") or 0) * width


def _feed_forward(
    prefix: str, hidden: int, width: int, family: Family, facts: dict[str, Any]
) -> Iterator[TensorShape]:
    bias = family.mlp_bias or bool(facts.get("mlp_bias") or facts.get("use_bias"))
    if family.fused_mlp:
        yield from _linear(f"{prefix}.gate_up_proj", 2 * width, hidden, bias)
    else:
        if family.gated:
            yield from _linear(f"{prefix}.gate_proj", width, hidden, bias)
        yield from _linear(f"{prefix}.up_proj", width, hidden, bias)
    yield from _linear(f"{prefix}.down_proj", hidden, width, bias)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[TensorShape]:
    shape = (rows, columns)
    yield TensorShape(name=f"{name}.weight", shape=shape, role=role_of(name, shape))
    if bias:
        yield TensorShape(name=f"{name}.bias", shape=(rows,))


def _norm(name: str, width: int, family: Family) -> Iterator[TensorShape]:
    yield TensorShape(name=f"{name}.weight", shape=(width,))
    if family.norm_bias:
        yield TensorShape(name=f"{name}.bias", shape=(width,))


def _first(facts: dict[str, Any], *names: str) -> Any:
    """Return the first of the dimensions that the config has."""
    for name in names:
        if facts.get(name) is not None:
            return facts[name]
    raise KeyError(names[-1])
