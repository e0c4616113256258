"""The catalog of known models, written from the table docs/known_models.txt.

    python docs/known_models.py      # writes src/megatrain/planning/catalog/known_models.jsonl

The table has the dimensions in their published config.json. Each becomes a config of transformers
and a model without memory, whose tensors are written down, so that `megatrain estimate` plans a
known model without torch. tests/planning/catalog/test_known_models.py holds the file to the table.

The column `from` shows how the dimensions were checked:

    c   compared with a public copy of the config: litgpt's table of models, NVIDIA's
        Megatron-Bridge, the defaults of transformers, or tests of programs that read it
    k   from knowledge of the config; the published number of parameters is the only check

Models with a vision part are listed with their text decoder only, the part that is trained.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatrain.models.build import build_decoder
from megatrain.models.config_json import parse_config
from megatrain.planning.model.shapes import BlockShape, ModelShape
from megatrain.planning.model.skeleton import shape_of

TABLE = Path(__file__).with_name("known_models.txt")
CATALOG = Path(__file__).parents[1] / "src/megatrain/planning/catalog/known_models.jsonl"
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""The same in every model of DeepSeek's kind so far."""
_EXPERT_KEYS = {
    "mixtral": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "qwen3_moe": "num_experts",
    "olmoe": "num_experts",
}
"""Others call them n_routed_experts."""
_GEMMA_4 = {"final_logit_softcapping": 30.0, "attention_k_eq_v": True, "global_head_dim": 512}
_FAMILIES: dict[str, dict[str, float]] = {
    "gemma2": {"final_logit_softcapping": 30.0},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
    "glm4": {"attention_bias": False},
    "gemma4_text": _GEMMA_4 | {"hidden_size_per_layer_input": 0},
    "gemma4_unified_text": _GEMMA_4,
}
"""Fields of a config that all rows of a family share, unless a row has its own."""
_EXPERTS = re.compile(r"(\d+)/(\d+)(?:x(\d+))?(?:\+(\d+))?")
"""Chosen / all x width of each + shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    name: str
    published_params: float
    """As its makers or the Hub give it."""
    checked: bool
    """The dimensions were compared with a public copy of the config."""
    config: dict[str, Any]
    """The dimensions of its config.json."""
    form: str = ""
    """The form of its published weights, where they are not plain bf16."""


def table() -> list[Row]:
    """Return the rows of the table."""
    lines = TABLE.read_text().splitlines()
    return [_row(line) for line in lines if not line.startswith("#")]


def line_of(row: Row) -> str:
    """Return a model's line of the catalog."""
    shape = skeleton_shape(row.config, row.name)
    # A table of dimensions does not have the positions that a model declares.
    fields = {key: value for key, value in asdict(shape).items() if key in _WRITTEN}
    facts = {
        "name": row.name,
        "published_params": row.published_params,
        "form": row.form,
        **fields,
        "layer_kinds": "".join(map(str, shape.layer_kinds)),
        "embedding": _block(shape.embedding),
        "structures": [_block(structure) for structure in shape.structures],
        "head": _block(shape.head),
    }
    return json.dumps(facts)


_WRITTEN = (
    "family", "vocab", "hidden", "tied", "by_document", "packs", "packs_by_lengths", "logit_copies",
)  # fmt: skip


def skeleton_shape(config: dict[str, Any], name: str) -> ModelShape:
    """Return the shape of the model that transformers makes of these dimensions."""
    data = json.dumps({"sliding_window": None} | config).encode()  # no window unless a row has one
    return shape_of(build_decoder(parse_config(data), "bf16"), name)


def _block(block: BlockShape) -> dict[str, Any]:
    fields = asdict(block)
    fields["tensors"] = [[t.name, t.role, *t.shape] for t in block.tensors]
    return {key: value for key, value in fields.items() if value != _DEFAULTS[key]}


_DEFAULTS = asdict(BlockShape(tensors=()))


def _row(line: str) -> Row:
    family, name, published, checked, *numbers = line.split()[:11]
    hidden, layers, heads, kv_heads, head_dim, inner, vocab = map(int, numbers)
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
    }
    if head_dim:
        config["head_dim"] = head_dim
    config |= _FAMILIES.get(family, {})
    words = line.split()[11:]
    for word in words:
        config |= {} if word.startswith("@") else _extra(family, word)
    return Row(
        name=name,
        published_params=float(published) * 1e9,
        checked=checked == "c",
        config=config,
        form=next((word[1:] for word in words if word.startswith("@")), ""),
    )


def _extra(family: str, word: str) -> dict[str, Any]:
    """Return what a word behind the numbers of a row means."""
    if word in _WORDS:
        return _WORDS[word]
    key, _, value = word.partition("=")
    if value:
        return {_KEYS[key]: int(value)}
    match = _EXPERTS.fullmatch(word)
    assert match is not None, word
    chosen, experts, width, shared = match.groups()
    config: dict[str, Any] = {
        "num_experts_per_tok": int(chosen),
        _EXPERT_KEYS.get(family, "n_routed_experts"): int(experts),
    }
    if width:
        config["moe_intermediate_size"] = int(width)
    if shared:
        config["n_shared_experts"] = int(shared)
    return config | (_LATENT | {"q_lora_rank": None} if family.startswith("deepseek") else {})


_KEYS = {
    "dense": "first_k_dense_replace",
    "g": "num_global_key_value_heads",
    "q": "q_lora_rank",
    "v": "linear_num_value_heads",
    "w": "sliding_window",
}
_WORDS: dict[str, dict[str, Any]] = {
    "t": {"tie_word_embeddings": True},
    "u": {"tie_word_embeddings": False},
    "qkv": {"attention_bias": True},
    "qkn": {"use_qk_norm": True},
    "bias": {"use_bias": True},
}


if __name__ == "__main__":
    CATALOG.write_text("".join(f"{line_of(row)}\n" for row in table()))
