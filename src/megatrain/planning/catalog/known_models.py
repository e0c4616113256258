"""Known decoders: the dimensions in their published config.json, and their published size.

The table is models.txt: dimensions only, so that `estimate` can plan a model that is not on this
machine, without a network. Names are those of the Hub. A name is found in any case, without its
organisation, and with the ending of a variant that has the same dimensions (`-Instruct`, `-Base`,
`-it`, ...).

The column `from` shows how the dimensions were checked:

    c   compared with a public copy of the config: litgpt's table of models, NVIDIA's
        Megatron-Bridge, or the defaults of transformers
    k   from knowledge of the config; the published number of parameters is the only check

Models with a vision part are listed with their text decoder only, the part that is trained.

Laws (tests/planning/catalog/test_known_models.py)
    1. The params that the dimensions give are within 1 % of the published number.
    2. A name that is not known is refused with the names that come near.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError
from megatrain.quantisation import READABLE

_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""The same in every model of DeepSeek's kind so far."""
_EXPERT_KEYS = {
    "mixtral": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "qwen3_moe": "num_experts",
    "olmoe": "num_experts",
}
"""Others call them n_routed_experts."""
_LOGITS: dict[str, dict[str, float]] = {
    "gemma2": {"final_logit_softcapping": 30.0},
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
}
"""Families whose logits are capped or scaled, which holds copies of them."""
_EXPERTS = re.compile(r"(\d+)/(\d+)(?:x(\d+))?(?:\+(\d+))?")
"""Chosen / all x width of each + shared."""
_VARIANT = re.compile(r"-(instruct|base|chat|it|pt|hf|thinking|preview|\d{4})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """One row of the table."""

    name: str
    published_params: float
    """As its makers or the Hub give it."""
    checked: bool
    """The dimensions were compared with a public copy of the config."""
    config: dict[str, Any]
    """What of its config.json the dimensions are."""
    weights: str = ""
    """What is special about its published weights."""


@cache
def _lines() -> tuple[str, ...]:
    text = (Path(__file__).parent / "models.txt").read_text()
    return tuple(line for line in text.splitlines() if not line.startswith("#"))


def known_models() -> tuple[KnownModel, ...]:
    """Return every known model, in the order of the table."""
    return tuple(_row(line) for line in _lines())


def find_known_model(name: str) -> KnownModel:
    """Return the model that is meant. Raises ConfigError with the names that come near."""
    rows = [line.split()[1] for line in _lines()]
    for key in (_whole, _short, _stem):
        found = [number for number, row in enumerate(rows) if key(row) == key(name)]
        if found:
            return _row(_lines()[found[0]])
    raise ConfigError(
        f"{name[:200]} is not a folder, a file or a known model.{_nearest(name, rows)}"
    )


def _nearest(name: str, rows: list[str]) -> str:
    short = {_short(row): row for row in rows}
    near = difflib.get_close_matches(_short(name)[:100], short, n=3, cutoff=0.6)
    if near:
        return f" Did you mean {' or '.join(short[each] for each in near)}?"
    known = f"`megatrain estimate --list` lists the {len(rows)} known models"
    return f" {known}; or give the path of a config.json"


def _whole(name: str) -> str:
    return name.lower()


def _short(name: str) -> str:
    return name.lower().rpartition("/")[2]


def _stem(name: str) -> str:
    """Return the name without the endings of variants: meta-llama-3-8b for ...-8B-Instruct."""
    stem = _short(name).removeprefix("meta-")
    while (shorter := _VARIANT.sub("", stem)) != stem:
        stem = shorter
    return stem


def _row(line: str) -> KnownModel:
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
    config |= _LOGITS.get(family, {})
    words = line.split()[11:]
    for word in words:
        config |= {} if word.startswith("@") else _extra(family, word)
    return KnownModel(
        name=name,
        published_params=float(published) * 1e9,
        checked=checked == "c",
        config=config,
        weights=next((weights_note(word[1:]) for word in words if word.startswith("@")), ""),
    )


def weights_note(form: str) -> str:
    """Return what to know of weights of this form."""
    if form == "vision":
        return "include a vision part, which is carried as it is and not counted here"
    if form.lower() in READABLE:
        return f"are stored in {form}; loading dequantises them to bf16"
    return f"are stored in {form}, which cannot be loaded; start from unquantised ones"


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


_KEYS = {"dense": "first_k_dense_replace", "q": "q_lora_rank", "w": "sliding_window"}
_WORDS: dict[str, dict[str, Any]] = {
    "t": {"tie_word_embeddings": True},
    "u": {"tie_word_embeddings": False},
    "qkv": {"attention_bias": True},
    "qkn": {"use_qk_norm": True},
    "bias": {"use_bias": True},
}
