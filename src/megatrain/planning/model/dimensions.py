"""What the fields of a `config.json` say of a layer: its attention, its window, its experts.

Law (tests/planning/catalog/test_families.py): attention, windows and experts from dimensions are
those of the real skeleton.
"""

from __future__ import annotations

from typing import Any

from megatrain.planning.model.shapes import AttentionShape, ParamRole


def role_of(name: str, shape: tuple[int, ...]) -> ParamRole:
    """Return the use of a layer's param; biases of experts only look like matrices."""
    if "experts" in name and "shared" not in name and len(shape) > 1:
        return "experts"
    return "matrix" if len(shape) == 2 else "vector"


def declared_positions(facts: dict[str, Any]) -> int | None:
    """Return the longest row that the model was made for; None where its config has none."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    found = (facts[name] for name in names if isinstance(facts.get(name), int))
    return next(found, None)


def expert_counts(facts: dict[str, Any]) -> tuple[int, int]:
    """Return how many experts a layer has and how many of them a token uses."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    count = next((int(facts[name]) for name in names if facts.get(name)), 0)
    used = ("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_top_k", "top_k_experts")
    return count, next((int(facts[name]) for name in used if facts.get(name)), 1)


def logit_copies(facts: dict[str, Any]) -> int:
    """Return how many copies of its logits a model's own way with them holds while they go back."""
    if facts.get("final_logit_softcapping"):
        return 5  # tanh, its product, the product's gradient, and those of both
    scales = ("logit_scale", "logits_scaling", "lm_head_multiplier")
    return 3 if any(facts.get(name) not in (None, 1) for name in scales) else 0


def attention_of(facts: dict[str, Any], window: int | None) -> AttentionShape:
    """Return the attention that a config's dimensions describe."""
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
        score_bytes=_SCORE_BYTES.get(str(facts.get("model_type")), 0),
    )


_SCORE_BYTES = {"gemma2": 13, "gpt_oss": 8}
_PERIODS = {
    "gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "cohere2": 4, "olmo3": 4, "exaone4": 4,
    "llama4_text": 4,
}  # fmt: skip
"""Every so-many-th layer sees all tokens, where a config does not list its layers."""


def layer_windows(facts: dict[str, Any], num_layers: int) -> list[int | None]:
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
