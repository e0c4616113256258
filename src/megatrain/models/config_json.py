"""A strict reader for a model folder's `config.json`: untrusted input, checked before use.

Transformers turns unknown keys into attributes, and some attributes load code or kernels. Only what
passes here reaches it:

    1. the file is a small JSON object, not deep, without repeated keys;
    2. no key asks for kernels or an attention implementation, and none starts with an
       underscore or hides a method of the configuration class; of quantizations, transformers
       sees none, and those that we cannot read are refused;
    3. every number is finite and within the range of any model we could hold, and so are the
       products that transformers would loop over;
    4. `model_type` names a causal language model that transformers ships itself, alone or in a
       joint model whose parts are known (multimodal.py).

Many folders bring code of their own, and name it in `auto_map`. It is never run: where transformers
has the family, its code is that of the family, and the key is taken out; where it has not, the
folder is refused. Some folders call a family of transformers by another name (OTHER_NAMES).

Laws (tests/models/test_config_json.py)
    1. Whatever the bytes, the result is a configuration or a ModelConfigError.
    2. A folder with code of its own, or with another name of its family, is read as the family is,
       and its export needs neither.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from megatrain.errors import ConfigError, ModelConfigError, listing
from megatrain.models.classes import scores_texts
from megatrain.models.multimodal import UNFIT, is_joint, part_class, parts_of, text_part
from megatrain.quantization import QUANTIZATION_KEY, Quantization, read_quantization

CONFIG_NAME = "config.json"
MAX_CONFIG_BYTES = 4 << 20
MAX_DEPTH = 12
MAX_TEXT = 65536
MAX_ENTRIES = 1 << 16
MAX_KEY = 256

CODE_KEY = "auto_map"
"""Names classes in files of the folder. Transformers too ignores it where it has the family."""
OTHER_NAMES = {"kimi_k2": "deepseek_v3"}
"""Families of transformers by the names that folders have for them. Transformers reads kimi_k2 so
inside kimi_k25, and the architecture that these folders name is DeepseekV3ForCausalLM."""
# Keys that make transformers import, fetch or replace code, whatever their value.
REFUSED_KEYS = {
    CODE_KEY: "runs code from the folder",
    "custom_pipelines": "runs code from the folder",
    "trust_remote_code": "runs code from the folder",
    "_target_": "names code to run",
    "kernel_config": "loads kernels",
    "use_kernels": "loads kernels",
    "fusion_config": "replaces modules",
    "attn_implementation": "loads kernels",
    "experts_implementation": "loads kernels",
    "distributed_config": "changes how the model is built",
    "per_layer_config": "changes how the model is built",
    QUANTIZATION_KEY: "a part of a model that is quantized in its own way cannot be read",
    "compression_config": "it is an old form of compressed-tensors, which cannot be read",
}
UNDERSCORE = "keys with a leading underscore reach internals"
# Written by transformers itself; these carry no meaning for the model ...
IGNORED_KEYS = {"_name_or_path", "_commit_hash"}
# ... and these do, and are plain values.
UNDERSCORED = {"_sliding_window_pattern", "_remove_final_layer_norm", "_pad_token_id"}
PER_LAYER = "per_layer_config"
"""A key that transformers writes for text decoders whose layers differ in width."""
AUTOSET = "_attn_implementation_autoset"
"""A flag that many folders carry; as a flag, and only so, it is ignored."""
KNOWN_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
"""Transformers looks up any `dtype` in torch, a function or a module too: others are ignored."""
# They carry an `is_decoder` that is false and that their code never reads.
ALWAYS_CAUSAL = {"gpt_neox", "gpt_neox_japanese"}
# The largest value any real model could have; beyond it a folder only wants to exhaust us.
LARGEST_VALUES = {
    "num_hidden_layers": 256, "n_layer": 256, "n_layers": 256, "num_layers": 256,
    "hidden_size": 1 << 18, "n_embd": 1 << 18, "d_model": 1 << 18, "head_dim": 1 << 14,
    "intermediate_size": 1 << 20, "n_inner": 1 << 20, "ffn_dim": 1 << 20, "d_ff": 1 << 20,
    "moe_intermediate_size": 1 << 20, "ffn_hidden_size": 1 << 20,
    "vocab_size": 1 << 24, "num_attention_heads": 512, "n_head": 512, "n_heads": 512,
    "num_key_value_heads": 512, "num_experts": 4096, "num_local_experts": 4096,
    "n_routed_experts": 4096, "max_position_embeddings": 1 << 28, "n_positions": 1 << 28,
    "num_labels": 1 << 16, "partial_rotary_factor": 1, "rotary_pct": 1,
}  # fmt: skip
# Any other number may become a loop or a table; these only scale or bound positions, or count.
LARGEST_INT = 1 << 20
LARGEST_LENGTH = 1 << 40
LENGTHS = re.compile(
    "position|length|_len|seq|ctx|window|chunk|theta|base|seed|param|flop|total|token|vocab"
)
# Folders store each expert of each layer apart: more than this no model has.
MAX_LAYER_EXPERTS = 1 << 15
# mpt makes a mask of heads times positions whatever the length of its input.
MAX_HEAD_POSITIONS = 1 << 25
MAX_LAYERS = LARGEST_VALUES["num_hidden_layers"]
PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_\-]{0,127}")


def parse_config(data: bytes) -> PreTrainedConfig:
    """Return the configuration that `data` describes. Raises ModelConfigError."""
    given = read_object(data)
    fields = _as_family(given)
    _check_value(fields, "", 0)
    read_quantization(fields.pop(QUANTIZATION_KEY, None))
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        raise ModelConfigError(f"{CONFIG_NAME}: no model_type; it is the family, e.g. llama")
    joint = is_joint(model_type)
    if not joint and (
        model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type not in CONFIG_MAPPING
    ):
        code = f" Its code is in the folder ({CODE_KEY}), and is never run." * (CODE_KEY in given)
        raise ModelConfigError(
            f"{CONFIG_NAME}: model_type {model_type[:80]!r} is not a causal language model of the "
            f"installed transformers.{code} A newer transformers may have it."
        )
    config_class = CONFIG_MAPPING[model_type]
    if model_type in UNFIT:
        raise ModelConfigError(f"{CONFIG_NAME}: {model_type} is refused: {UNFIT[model_type]}.")
    if not joint:
        _check_single(model_type)
    _check_repeats(fields)
    own_layers = PER_LAYER in fields and PER_LAYER in config_class().to_dict()
    passed = (
        _passed_part(model_type, fields, config_class)
        if own_layers
        else _passed(fields, config_class)
    )
    try:
        config = config_class.from_dict(passed)
        text = text_part(config)
    except Exception as error:  # transformers validates with many kinds of exception
        raise ModelConfigError(
            f"{CONFIG_NAME}: transformers rejects it as a {model_type}: {_first_line(error)}"
        ) from error
    if not isinstance(text, PreTrainedConfig):
        name = next(name for name, value in vars(config).items() if value is text)
        raise ModelConfigError(
            f"{CONFIG_NAME}: {name} is {text!r:.80}, but {model_type} has no part of that name. "
            "Remove the key."
        )
    for one in (config,) if text is config else (config, text):
        _check_causal(one)
        _check_products(one)
    return config


def read_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`; anything else is a ModelConfigError."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{CONFIG_NAME} is not valid JSON: {_first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{CONFIG_NAME} is a {type(value).__name__}, not an object")
    return value


def without_quantization(data: bytes) -> tuple[bytes, Quantization | None]:
    """Return a config.json of plain weights, and how those of `data` are quantized.

    Raises ModelConfigError.
    """
    fields = read_object(data)
    if QUANTIZATION_KEY not in fields:
        return data, None
    quantization = read_quantization(fields.pop(QUANTIZATION_KEY))
    return json.dumps(fields, indent=2).encode() + b"\n", quantization


def as_family(data: bytes) -> tuple[bytes, list[str]]:
    """Return a config.json that transformers reads without code of the folder, and notes on it.

    Raises ModelConfigError.
    """
    given = read_object(data)
    fields = _as_family(given)
    if fields == given:
        return data, []
    notes, model_type = [], fields.get("model_type")
    if model_type != given.get("model_type"):
        notes.append(
            f"{CONFIG_NAME} calls the model {given['model_type']}: it is a {model_type} of "
            "transformers, and exports say so"
        )
    elif CODE_KEY in given:
        notes.append(
            f"{CONFIG_NAME} names code in the folder ({CODE_KEY}): it is not run, because "
            f"transformers has {model_type} itself, and exports do not name it"
        )
    return json.dumps(fields, indent=2).encode() + b"\n", notes


def _as_family(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model and its parts without code, by their families' own names."""
    found = {key: value for key, value in fields.items() if key != CODE_KEY}
    model_type = found.get("model_type")
    if isinstance(model_type, str) and model_type in OTHER_NAMES:
        found["model_type"] = OTHER_NAMES[model_type]
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        parts = (name for name in parts_of(model_type) if isinstance(found.get(name), dict))
        found |= {name: _as_family(found[name]) for name in parts}
    return found


def _unique(pairs: list[tuple[str, Any]]) -> Any:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is given twice")
    # How transformers writes the floats that JSON lacks.
    if len(result) == 1 and result.get("__float__") in ("Infinity", "-Infinity"):
        return float(result["__float__"])
    return result


def _check_value(value: Any, where: str, depth: int, largest: int = LARGEST_INT) -> None:
    """Refuse depth, length and numbers that no real configuration has."""
    if depth > MAX_DEPTH:
        raise ModelConfigError(f"{CONFIG_NAME}: {where[:80]} is nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict | list) and len(value) > MAX_ENTRIES:
        raise ModelConfigError(f"{CONFIG_NAME}: {where} has {len(value)} entries")
    if isinstance(value, dict):
        for key, item in value.items():
            inner = f"{where}.{key[:MAX_KEY]}" if where else key[:MAX_KEY]
            if depth == 1 and (key in UNDERSCORED or (key, type(item)) == (AUTOSET, bool)):
                continue  # of a part; what the part may not have is seen later
            if depth != 1 or key != PER_LAYER:
                _check_key(key, inner, depth)
            _check_size(inner, key, item)
            _check_value(item, inner, depth + 1, _largest(key))
    elif isinstance(value, list):
        for item in value:
            _check_value(item, where, depth + 1, largest)
    elif isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise ModelConfigError(f"{CONFIG_NAME}: {where} is a text of {len(value)} characters")
    elif isinstance(value, float):
        if math.isnan(value):
            raise ModelConfigError(f"{CONFIG_NAME}: {where} is not a number")
    elif isinstance(value, int) and abs(value) > largest:
        raise ModelConfigError(f"{CONFIG_NAME}: {where} is {str(value)[:40]}: out of range")


def _check_key(key: str, where: str, depth: int) -> None:
    """Refuse keys that no dictionary may have; `_check_keys` knows those of the outermost."""
    if len(key) > MAX_KEY:
        raise ModelConfigError(f"{CONFIG_NAME}: {where[:80]!r} is not a plain key")
    if depth and key in REFUSED_KEYS:
        raise ModelConfigError(_refusal(where, REFUSED_KEYS[key]))
    if depth and key.startswith("_") and key not in IGNORED_KEYS:
        raise ModelConfigError(_refusal(where, UNDERSCORE))


def _largest(key: str) -> int:
    return LARGEST_VALUES.get(key) or (LARGEST_LENGTH if LENGTHS.search(key) else LARGEST_INT)


def _check_size(where: str, key: str, value: Any) -> None:
    largest = LARGEST_VALUES.get(key)
    if largest is None or value is None:
        return
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ModelConfigError(f"{CONFIG_NAME}: {where} must be a number, not {number!r:.80}")
        if not 0 <= number <= largest:
            raise ModelConfigError(
                f"{CONFIG_NAME}: {where} is {str(number)[:40]}; it must be from 0 to {largest}"
            )


def _check_repeats(fields: dict[str, Any]) -> None:
    """Refuse short lists that unfold into long ones: gpt_neo's [kinds of attention, how often]."""
    types = fields.get("attention_types")
    total = sum(
        len(item[0]) * item[1]
        for item in (types if isinstance(types, list) else [])
        if isinstance(item, list) and [type(part) for part in item[:2]] == [list, int]
    )
    if total > MAX_LAYERS:
        raise ModelConfigError(
            f"{CONFIG_NAME}: attention_types describe {total} layers; the limit is {MAX_LAYERS}"
        )


def _check_products(config: PreTrainedConfig) -> None:
    """Refuse numbers that are possible alone and exhaust us together."""
    products = [
        ("num_hidden_layers", key, MAX_LAYER_EXPERTS)
        for key in vars(config)
        if key.endswith("experts")
    ]
    products.append(("n_heads", "max_seq_len", MAX_HEAD_POSITIONS))
    for first, second, largest in products:
        a, b = getattr(config, first, None), getattr(config, second, None)
        if isinstance(a, int) and isinstance(b, int) and a * b > largest:
            raise ModelConfigError(
                f"{CONFIG_NAME}: {first} {a} times {second} {b} is {a * b}; the limit is {largest}"
            )


def _passed(fields: dict[str, Any], config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return what transformers may see of `fields`, after a look at every key that reaches it."""
    _check_keys(fields, config_class)
    passed = {key: value for key, value in fields.items() if key not in IGNORED_KEYS | {AUTOSET}}
    for key in {"dtype", "torch_dtype"} & passed.keys():
        if passed[key] not in [None, *KNOWN_DTYPES]:
            del passed[key]
    for name, declared in config_class.sub_configs.items():
        if isinstance(passed.get(name), dict):
            found = part_class(config_class.model_type, name, declared, passed[name])
            passed[name] = _passed_part(name, passed[name], found or PreTrainedConfig)
    return passed


def _passed_part(
    name: str, fields: dict[str, Any], config_class: type[PreTrainedConfig]
) -> dict[str, Any]:
    """Return what transformers may see of a decoder whose layers may have other fields."""
    layers = fields.get(PER_LAYER)
    if layers is None:
        return _passed(fields, config_class)
    if not isinstance(layers, dict) or not all(isinstance(one, dict) for one in layers.values()):
        raise ModelConfigError(
            f"{CONFIG_NAME}: {name}.{PER_LAYER} is not a list of fields by layer"
        )
    rest = {key: value for key, value in fields.items() if key != PER_LAYER}
    own = {layer: _passed(one, config_class) for layer, one in layers.items()}
    return {**_passed(rest, config_class), PER_LAYER: own}


def _check_keys(fields: dict[str, Any], config_class: type[PreTrainedConfig]) -> None:
    """Refuse top-level keys that reach code, or that would hide a part of the class itself."""
    declared = _declared(config_class)
    for key, value in fields.items():
        if key in IGNORED_KEYS or key in UNDERSCORED or key in declared:
            continue
        if key == AUTOSET and isinstance(value, bool):
            continue
        if key in REFUSED_KEYS:
            raise ModelConfigError(_refusal(key, REFUSED_KEYS[key]))
        if key.startswith("_"):
            raise ModelConfigError(_refusal(key, UNDERSCORE))
        if not PLAIN_KEY.fullmatch(key):
            raise ModelConfigError(f"{CONFIG_NAME}: {key[:80]!r} is not a plain key")
        # A property cannot be hidden: transformers sets it (rope_scaling) or refuses it.
        if hasattr(config_class, key) and not _is_property(config_class, key):
            raise ModelConfigError(_refusal(key, f"it would hide {config_class.__name__}.{key}"))


def _is_property(config_class: type[PreTrainedConfig], key: str) -> bool:
    return isinstance(inspect.getattr_static(config_class, key), property)


def _declared(config_class: type[PreTrainedConfig]) -> set[str]:
    """Return the keys a configuration class declares: its fields and their other names."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    fields |= set(config_class.attribute_map) | {"model_type", "torch_dtype", "dtype"}
    return {name for name in fields if not name.startswith("_")} - set(REFUSED_KEYS)


def _check_single(model_type: str) -> None:
    """Refuse a combination of several models that is not a joint model."""
    if parts := parts_of(model_type):
        raise ModelConfigError(
            f"{model_type} has a decoder and {listing(parts - {'text_config'} or parts)}; only "
            "text decoders, alone or in joint models of transformers, are supported."
        )


def _check_causal(config: PreTrainedConfig) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelConfigError(f"{config.model_type} is an encoder-decoder model, not a decoder")
    if getattr(config, "is_decoder", True) is False and config.model_type not in ALWAYS_CAUSAL:
        raise ModelConfigError(
            f"{config.model_type} is configured as an encoder (is_decoder false)"
        )


def _refusal(key: str, reason: str) -> str:
    way_out = "" if reason.endswith("cannot be read") else " Remove the key to continue."
    return f"{CONFIG_NAME}: key {key[:120]} is refused: {reason}.{way_out}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (": ".join(lines[:2]) or type(error).__name__)[:300]


def with_labels(config_json: bytes, num_labels: int) -> bytes:
    """Return a config.json for a head with so many labels; one that is there stays as it is.

    Raises ConfigError if the family has no such head, or another number of labels.
    """
    if num_labels < 1:
        raise ConfigError(f"num_labels is {num_labels}; give 1 for a reward, or more for classes.")
    config = parse_config(config_json)
    if scores_texts(config):
        if config.num_labels != num_labels:
            raise ConfigError(
                f"num_labels is {num_labels}, and the model has {config.num_labels} already. Leave "
                "num_labels out, or start from the language model."
            )
        return config_json
    fields: dict[str, Any] = json.loads(config_json)
    family = fields.get("model_type", "")
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(family)
    if name is None:
        raise ConfigError(
            f"num_labels is {num_labels}: transformers has no model that classifies with "
            f"{family or 'this family'}."
        )
    labels = {str(number): f"LABEL_{number}" for number in range(num_labels)}
    fields |= {
        "architectures": [name],
        "id2label": labels,
        "label2id": {label: int(number) for number, label in labels.items()},
    }
    if fields.get("pad_token_id") is None:  # it tells transformers where a text ends
        end = fields.get("eos_token_id")
        fields["pad_token_id"] = end[0] if isinstance(end, list) else end
    return json.dumps(fields, indent=2).encode()
