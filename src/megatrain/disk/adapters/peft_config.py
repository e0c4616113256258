"""`adapter_config.json`, as PEFT writes it: a strict reader and a writer.

The file is untrusted input. PEFT's methods are many, and most of them change what a model computes:
a key that asks for one of those we do not have is refused by its name, and so is a key that we do
not know unless it is off. What only says where an adapter came from is ignored.

Laws (tests/disk/adapters/test_peft_config.py)
    1. Whatever the bytes, the result is a PeftConfig or a ModelConfigError.
    2. No key that changes what the model computes is ignored.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from types import NoneType
from typing import Any

from megatrain.disk.adapters.peft_targets import PeftTargets
from megatrain.disk.hf.safetensors_format import unique_keys
from megatrain.errors import ModelConfigError, listing
from megatrain.model_files import ADAPTER_CONFIG_NAME

MAX_ADAPTER_CONFIG_BYTES = 4 << 20
"""A list of all modules of the largest models is a tenth of it."""
MAX_RANK = 1 << 16
MAX_ALPHA = 1e9
MAX_REFERENCE = 1024
"""Characters in the name of a base model."""
_KNOWN = {
    "peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "base_model_name_or_path",
    "revision", "target_parameters",
}  # fmt: skip
# Where an adapter came from, or how PEFT finds its modules: their names are in the weights.
_IGNORED = {
    "peft_version", "task_type", "auto_mapping", "inference_mode", "runtime_config",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core",
    "qalora_group_size", "fan_in_fan_out", "ensure_weight_tying",
}  # fmt: skip
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the weights of the base as they are."""
_OTHER_KEYS = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "adapters with biases",
    "modules_to_save": "modules that were trained whole",
    "trainable_token_indices": "tokens that were trained beside the adapters",
    "rank_pattern": "ranks that differ between modules",
    "alpha_pattern": "alphas that differ between modules",
    "layer_replication": "repeated layers",
    "megatron_config": "Megatron's layers",
    "alora_invocation_tokens": "aLoRA",
    "arrow_config": "Arrow",
    "corda_config": "CorDA",
    "kasa_config": "KaSA",
    "use_bdlora": "BD-LoRA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
_NAME = re.compile(r"[A-Za-z0-9_.]{1,500}", re.ASCII)
_HARMLESS_STARTS = {"eva_config", "lora_ga_config", "loftq_config"}
"""Settings of initializations; `init_lora_weights` names the one that was used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """The adapters that a folder describes."""

    rank: int
    alpha: float
    dropout: float = 0.0
    rslora: bool = False
    params: tuple[str, ...] = ()
    """The names of adapted params, or their ends; weights of linear modules may be among them."""
    base: str | None = None
    """The model that the adapters belong to: a folder, or an id on the Hub."""
    revision: str | None = None
    """The revision, if `base` is an id."""

    def to_bytes(self, targets: PeftTargets, *, fan_in_fan_out: bool = False) -> bytes:
        """Return the file for adapters of these modules; some may keep (in, out) weights.

        PEFT has no dropout beside a param, so a file with `targets.parameters` says 0.
        """
        fields = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "revision": self.revision,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if float(self.alpha).is_integer() else self.alpha,
            "lora_dropout": 0.0 if targets.parameters else self.dropout,
            "use_rslora": self.rslora,
            "target_modules": list(targets.modules),
            "target_parameters": list(targets.parameters) or None,
            "bias": "none",
            "fan_in_fan_out": fan_in_fan_out,
            "init_lora_weights": True,
            "modules_to_save": None,
        }
        return json.dumps(fields, indent=2, sort_keys=True).encode() + b"\n"


def parse_peft_config(data: bytes) -> PeftConfig:
    """Return what `data` says. Raises ModelConfigError."""
    fields = _object(data)
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise _refusal(f"peft_type is {_shown(kind)}; only LORA is supported")
    _refuse_others(fields)
    rank: Any = fields.get("r")
    alpha: Any = fields.get("lora_alpha")
    dropout: Any = fields.get("lora_dropout", 0)
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise _refusal(f"r is {_shown(rank)}; it must be a whole number from 1 to {MAX_RANK}")
    if not _is_number(alpha) or not 0 < alpha <= MAX_ALPHA:
        raise _refusal(f"lora_alpha is {_shown(alpha)}; it must be a number above 0")
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise _refusal(f"lora_dropout is {_shown(dropout)}; it must be from 0 to below 1")
    if not isinstance(fields.get("use_rslora", False), bool):
        raise _refusal(f"use_rslora is {_shown(fields['use_rslora'])}; it must be true or false")
    return PeftConfig(
        rank=rank,
        alpha=float(alpha),
        dropout=float(dropout),
        rslora=fields.get("use_rslora", False),
        params=_names(fields, "target_parameters"),
        base=_text(fields, "base_model_name_or_path"),
        revision=_text(fields, "revision"),
    )


def _object(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_ADAPTER_CONFIG_BYTES:
        raise _refusal(f"it is larger than {MAX_ADAPTER_CONFIG_BYTES >> 20} MiB")
    try:
        fields = json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"it is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise _refusal(f"it is a {type(fields).__name__}, not an object")
    return fields


def _refuse_others(fields: dict[str, Any]) -> None:
    """Raise ModelConfigError for a method that we do not have."""
    if (bias := fields.get("bias", "none")) != "none":
        raise _refusal(f"bias is {_shown(bias)}: trained biases of the base are not supported")
    start = fields.get("init_lora_weights", True)
    if type(start) not in (bool, str, NoneType) or start not in _PLAIN_STARTS:
        raise _refusal(
            f"init_lora_weights is {_shown(start)}, which may change the weights of the base. Save "
            "it as a plain LoRA with PEFT (path_initial_model_for_weight_conversion)"
        )
    for key, method in _OTHER_KEYS.items():
        if fields.get(key):
            raise _refusal(f"{key} is set ({method}), and is not supported")
    known = _KNOWN | _IGNORED | _HARMLESS_STARTS | {
        "bias", "init_lora_weights", *_OTHER_KEYS,
    }  # fmt: skip
    unknown = [key for key, value in fields.items() if key not in known and value]
    if unknown:
        raise _refusal(
            f"unknown keys: {listing(key[:80] for key in unknown)}. They may ask for a method that "
            "is not supported; if they do not, remove them"
        )


def _names(fields: dict[str, Any], key: str) -> tuple[str, ...]:
    """Return names of the model, which no reader may take for patterns."""
    given = fields.get(key) or []
    if not isinstance(given, list) or not all(
        isinstance(name, str) and _NAME.fullmatch(name) for name in given
    ):
        raise _refusal(f"{key} is {_shown(given)} that does not have names alone")
    return tuple(sorted(set(given)))


def _text(fields: dict[str, Any], key: str) -> str | None:
    value = fields.get(key)
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= MAX_REFERENCE):
        raise _refusal(f"{key} is {_shown(value)}; it must be a name")
    if value is not None and not value.isprintable():
        raise _refusal(f"{key} has characters that no name has")
    return value


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, dict | list) else repr(value)[:60]


def _refusal(reason: str) -> ModelConfigError:
    return ModelConfigError(f"{ADAPTER_CONFIG_NAME}: {reason}")
