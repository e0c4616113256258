"""Hostile `config.json`: keys that reach code, sizes that exhaust, bytes that are no config."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tests.attacks.folders import Case, cases, config, config_cases, write_config, write_weights
from tests.attacks.sandbox import LOADED

EVIL = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "evil/repo--modeling.Model"}
# How files on the hub made transformers import, download or replace code.
CODE_KEYS: dict[str, Any] = {
    "trust_remote_code": True,
    "custom_pipelines": {"text-generation": {"impl": "evil.Pipeline"}},
    "_target_": "os.system",
    "_attn_implementation": "evil/kernel",
    "_attn_implementation_internal": "evil/kernel",
    "_attn_implementation_autoset": "evil/kernel",
    "attn_implementation": "evil/kernel:forward",
    "_experts_implementation": "evil/kernel",
    "experts_implementation": "evil/kernel",
    "kernel_config": {"kernel_mapping": {"RMSNorm": "evil/kernel:RMSNorm"}},
    "use_kernels": True,
    "fusion_config": {"mlp": "evil.Fused"},
    "distributed_config": {"enable_expert_parallel": True},
    "per_layer_config": {"0": {"_attn_implementation": "evil/kernel"}},
    "quantization_config": {"quant_method": "evil", "modules_to_not_convert": []},
    "compression_config": {"format": "evil"},
    "_auto_class": "AutoModel",
    "_from_auto": True,
    "_anything": 1,
}
# Names of the configuration class itself: as attributes they would hide its methods.
SHADOWS = (
    "to_dict", "to_diff_dict", "from_dict", "update", "validate", "get_text_config",
    "is_custom_code", "attribute_map", "sub_configs", "sub_configs_defaults", "base_model_tp_plan",
    "save_pretrained", "push_to_hub", "register_for_auto_class", "__class__", "__dict__",
    "__init__", "__getattribute__", "__reduce__", "__post_init__", "__dataclass_fields__",
)  # fmt: skip
LOOK_ALIKES = {
    "Cyrillic a": "auto_m\u0430p", "full width": "\uff41uto_map", "zero width": "auto\u200b_map",
    "trailing space": "auto_map ", "leading space": " auto_map", "order mark": "\ufeffauto_map",
    "right to left": "\u202epam_otua", "NUL": "auto_map\0", "newline": "auto_map\n",
    "dots": "a.auto_map", "empty": "", "lone surrogate": "auto_map\ud800",
    "terminal escape": "\x1b]0;owned\x07",
}  # fmt: skip

CODE = config_cases(
    "ModelConfigError",
    {f"key {key}": {key: value} for key, value in CODE_KEYS.items()}
    | {f"nested key {k}": {"rope_parameters": {"in": {k: v}}} for k, v in CODE_KEYS.items()}
    | {f"key {key} in a list": {"x": [[{key: 1}]]} for key in ("auto_map", "_target_")}
    | {"nested key auto_map": {"rope_parameters": {"in": {"auto_map": EVIL}}}}
    | {f"shadow {key}": {key: "evil"} for key in SHADOWS}
    | {f"look-alike {name}": {key: EVIL} for name, key in LOOK_ALIKES.items()}
    | {
        "part with a kernel": {
            "model_type": "fuyu", "text_config": {"_attn_implementation": "evil/kernel"},
        },
        "code of a stranger": {"model_type": "evil", "auto_map": EVIL},
        "part of any type": {"model_type": "musicgen", "text_encoder": {"model_type": "llama"}},
        "settings that shadow": {"model_type": "mpt", "attn_config": {"to_dict": 1}},
        "settings with a kernel": {
            "model_type": "mpt", "attn_config": {"_attn_implementation_internal": "evil/kernel"},
        },
        "type as a path": {"model_type": "../../evil"},
        "type as a repository": {"model_type": "evil/repo"},
        "type of another library": {"model_type": "timm_wrapper"},
        "type that is no decoder": {"model_type": "bert"},
        "type of an encoder and decoder": {"model_type": "bart", "is_decoder": True},
        "type that is a dictionary": {"model_type": {"llama": 1}},
        "type that is endless": {"model_type": "llama" * 10_000},
        "type that is absent": {"model_type": None},
    },
)  # fmt: skip

NEUTRALIZED = config_cases(
    LOADED,
    {
        "dtype that names a function": {"dtype": "load"},
        "dtype that names a module": {"torch_dtype": "_inductor"},
        "dtype that is a dictionary": {"dtype": {"": "hub"}},
        "code that is not needed": {"auto_map": EVIL},
        "code that is not a mapping": {"auto_map": [["evil.Model"]]},
        "name of a repository": {"_name_or_path": "evil/repo", "_commit_hash": "0" * 40},
        "architecture of a stranger": {"architectures": ["EvilForCausalLM"]},
        "architectures as object": {"architectures": {"AutoModel": "evil.Model"}},
        "flag of an old version": {"_attn_implementation_autoset": True},
        "weights named elsewhere": {"transformers_weights": "../evil.bin"},
    },
)


def _of(family: str, **fields: Any) -> bytes:
    """Return a config of another family, without the sizes of the benign one."""
    return json.dumps({"model_type": family} | fields).encode()


def _raw(more: bytes) -> bytes:
    return b'{"model_type": "llama", %s}' % more


_LAYERS = {"num_hidden_layers": 256}
SIZES = config_cases(
    "ModelConfigError",
    {
        "a million layers": ({"num_hidden_layers": 10**6}, "from 0 to 256"),
        "width of 2^60": ({"hidden_size": 1 << 60}, "from 0 to 262144"),
        "number of 4000 digits": (_raw(b'"vocab_size": 1' + b"0" * 4000), "vocab_size is 1000"),
        "number of 5000 digits": (_raw(b'"vocab_size": 1' + b"0" * 5000), "not valid JSON"),
        "negative vocabulary": ({"vocab_size": -1}, "vocab_size is -1"),
        "infinite vocabulary": (_raw(b'"vocab_size": 1e999'), "vocab_size is inf"),
        "vocabulary in lists": ({"vocab_size": [1 << 40]}, "vocab_size is 1099511627776"),
        "experts beyond reason": (_of("mixtral", num_local_experts=1 << 20), "from 0 to 4096"),
        "layers times experts": (
            _of("mixtral", num_local_experts=4096, hidden_size=16, vocab_size=32, **_LAYERS),
            "4096 is 1048576; the limit is 32768",
        ),
        "labels": ({"num_labels": 1 << 24}, "num_labels is 16777216"),
        "attention repeated": (
            _of("gpt_neo", num_layers=2, attention_types=[[["global"], 1 << 19]]), "524288 layers",
        ),
        "attention repeated in many": (
            _of("gpt_neo", attention_types=[[["global"] * 9000, 500]] * 10), "45000000 layers",
        ),
        "attention repeated as text": (
            _of("gpt_neo", attention_types=[["x" * 60_000, "y" * 60_000]]), "rejects it",
        ),
        "unknown number": ({"anything": 1 << 30}, "anything is 1073741824: out of range"),
        "unknown number in a list": ({"anything": [[1 << 30]]}, "out of range"),
        "position of 2^50": ({"max_position_embeddings": 1 << 50}, "from 0 to"),
        "a mask for 2^40 tokens": (_of("mpt", max_seq_len=1 << 40), "the limit is 33554432"),
        "a state of 2^24": (_of("jamba", mamba_d_state=1 << 24), "out of range"),
        "rotary part beyond the whole": (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 4e6}},
            r"partial_rotary_factor is 4000000\.0; it must be from 0 to 1",
        ),
        "no heads": ({"num_attention_heads": 0, "head_dim": 8}, "modulo by zero"),
    },
) + config_cases(
    "UnsupportedModel",
    {
        "position tables of 32 GiB": (
            _of("xglm", d_model=1024, num_layers=2, max_position_embeddings=1 << 24),
            "tables and masks of 32768 MiB",
        ),
        "rotary tables of 64 GiB": (
            _of("gptj", n_positions=1 << 28, n_embd=64, n_layer=2, n_head=2, rotary_dim=32),
            "tables and masks of 65536 MiB",
        ),
        "many tables": (
            _of("gptj", n_positions=1 << 18, n_embd=128, n_layer=64, n_head=2, rotary_dim=64),
            "tables and masks of 4096 MiB, 64 MiB for the largest",
        ),
        "projection beside the layers": (
            _of("opt", hidden_size=1 << 17, word_embed_proj_dim=1 << 16, num_attention_heads=16),
            "is outside the layers and has 8589934592 elements",
        ),
        "modules without number": (
            _of("gemma3n_text", altup_num_inputs=1 << 20), "more than 16384 params",
        ),
        "heads of no width": {"head_dim": 0},
        "no layers": ({"num_hidden_layers": 0}, "no list of layers"),
        "no vocabulary": {"vocab_size": 0},
        "no experts": (
            _of("deepseek_v3", n_routed_experts=0, num_hidden_layers=4, hidden_size=64),
            "cannot convert its tensor names",
        ),
    },
) + config_cases(
    "DoesNotFit",
    {
        "ten trillion params": {
            "hidden_size": 1 << 16, "intermediate_size": 1 << 18, "num_hidden_layers": 190,
        },
        "ten trillion params in experts": _of(
            "mixtral", hidden_size=1 << 14, intermediate_size=1 << 15, num_hidden_layers=64,
            num_local_experts=256,
        ),
        "a vocabulary of 2^24": {"vocab_size": 1 << 24, "hidden_size": 1 << 16},
        "everything at its largest": {
            "hidden_size": 1 << 18, "intermediate_size": 1 << 20, "vocab_size": 1 << 24,
            "num_attention_heads": 512, "num_key_value_heads": 512, "head_dim": 1 << 14,
            "max_position_embeddings": 1 << 28, **_LAYERS,
        },
    },
)  # fmt: skip

MISMATCHES = config_cases(
    "WeightsMismatch",
    {
        "256 layers for two": _LAYERS,
        "more key heads than heads": {"num_key_value_heads": 3},
        "half the vocabulary": {"vocab_size": 16},
    },
)


def _nested(opening: bytes, depth: int, closing: bytes) -> bytes:
    inner = opening * depth + b"1" + closing * depth
    return _raw(b'"x": ' + inner)


_PLAIN = json.dumps(config())
BYTES = config_cases(
    "ModelConfigError",
    {
        "empty": b"",
        "one brace": b"{",
        "cut off": _PLAIN.encode()[:-20],
        "followed by another": _PLAIN.encode() * 2,
        "a list": b"[]",
        "a number": b"1",
        "null": b"null",
        "not UTF-8": b'{"model_type": "llama\xff"}',
        "UTF-16": _PLAIN.encode("utf-16"),
        "byte order mark": b"\xef\xbb\xbf" + _PLAIN.encode(),
        "overlong UTF-8": b'{"model_type": "\xc0\xaf"}',
        "NUL bytes": b"\0" * 4096,
        "JSON with comments": b"{/* */}",
        "NaN": {"rms_norm_eps": float("nan")},
        "NaN as transformers spells it": {"rms_norm_eps": {"__float__": "NaN"}},
        "NaN in a list": {"x": [[float("nan")]]},
        "a key twice": _raw(b'"vocab_size": 32, "vocab_size": 1'),
        "a nested key twice": _raw(b'"rope_parameters": {"a": 1, "a": 2}'),
        "deep lists": _nested(b"[", 100_000, b"]"),
        "deep objects": _nested(b'{"a":', 100_000, b"}"),
        "lists at the limit of the stack": _nested(b"[", 900, b"]"),
        "objects a little too deep": _nested(b'{"a":', 13, b"}"),
        "five MiB": b'{"model_type": "llama"%s}' % (b" " * (5 << 20)),
        "a long text": {"x": "y" * 70_000},
        "a long key": {"y" * 70_000: 1},
        "a long key around many": {"y" * 2_000_000: {str(i): 0 for i in range(60_000)}},
        "many entries": {"x": [0] * 70_000},
        "many keys": {f"k{i}": 0 for i in range(70_000)},
        "many keys in one": {"x": {f"k{i}": 0 for i in range(70_000)}},
    },
)

TYPES = config_cases(
    "ModelConfigError",
    {
        "width as text": {"hidden_size": "16"},
        "width as truth": {"hidden_size": True},
        "width as object": {"hidden_size": {"a": 1}},
        "width as fraction": {"hidden_size": 16.5},
        "width as nothing": {"hidden_size": None},
        "layers as list": {"num_hidden_layers": [2, 2]},
        "tie as text": {"tie_word_embeddings": "yes"},
        "activation as number": {"hidden_act": 5},
        "labels as list": {"id2label": ["a"]},
        "labels without numbers": {"id2label": {"a": "b"}},
        "rope as list": {"rope_parameters": ["default"]},
        "positions as text": {"max_position_embeddings": "64"},
        "bias as text": {"attention_bias": "true"},
        "heads that do not divide": {"hidden_size": 17},
    },
) + config_cases(
    "UnsupportedModel",
    {
        "unknown activation": {"hidden_act": "os.system"},
        "unknown rope": {"rope_parameters": {"rope_type": "__import__('os')"}},
        "padding beyond the vocabulary": {"pad_token_id": 10**6},
    },
)  # fmt: skip


def _link(target: str) -> Any:
    def make(folder: Path) -> None:
        write_weights(folder)
        write_config(folder.parent, config())
        (folder / "config.json").symlink_to(target)

    return make


def _special(create: Any) -> Any:
    def make(folder: Path) -> None:
        write_weights(folder)
        create(folder / "config.json")

    return make


FILES = cases(
    "config file",
    "ModelFolderError",
    {
        "absent": write_weights,
        "a pipe": _special(os.mkfifo),
        "a folder": _special(Path.mkdir),
        "a link out": _link("../config.json"),
        "a link to a device": _link("/dev/zero"),
        "a link to this process": _link("/proc/self/environ"),
        "a link to nothing": _link("nothing"),
        "a link to itself": _link("config.json"),
    },
)

CONFIG_CASES: list[Case] = [*CODE, *NEUTRALIZED, *SIZES, *MISMATCHES, *BYTES, *TYPES, *FILES]
