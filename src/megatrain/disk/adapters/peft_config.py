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
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

from megatrain.disk.adapters.peft_targets import PeftTargets
from megatrain.disk.hf.safetensors_format import unique_keys
from megatrain.errors import ModelConfigError, listing
from megatrain.model_files import ADAPTER_CONFIG_NAME
from megatrain.models.patterns import ends_like

MAX_ADAPTER_CONFIG_BYTES = 4 << 20
"""A list of all modules of the largest models is a tenth of it."""
MAX_RANK = 1 << 16
MAX_ALPHA = 1e9
MAX_REFERENCE = 1024
"""Characters in the name of a base model."""
_KNOWN = {
    "peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "base_model_name_or_path",
    "revision", "target_parameters", "rank_pattern", "alpha_pattern",
    "use_dora", "modules_to_save", "ensure_weight_tying",
}  # fmt: skip
# Where an adapter came from, or how PEFT finds its modules: their names are in the weights.
_IGNORED = {
    "peft_version", "task_type", "auto_mapping", "inference_mode", "runtime_config",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core",
    "qalora_group_size", "fan_in_fan_out",
}  # fmt: skip
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the weights of the base as they are."""
_OTHER_KEYS = {
    "use_qalora": "QALoRA",
    "lora_bias": "adapters with biases",
    "trainable_token_indices": "tokens that were trained beside the adapters",
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
_EXPRESSION = re.compile(r"\^?(?:[A-Za-z0-9_]|\.\*|\\?\.){1,500}\$?", re.ASCII)
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
    ranks: tuple[tuple[str, int], ...] = ()
    """Other ranks, by names or their ends, with a star for any characters."""
    alphas: tuple[tuple[str, float], ...] = ()
    dora: bool = False
    saved: tuple[str, ...] = ()
    """The modules that were trained whole, or the ends of their names."""
    tied: bool = False
    """Tables that the model ties are one among these, too."""
    base: str | None = None
    """The model that the adapters belong to: a folder, or an id on the Hub."""
    revision: str | None = None
    """The revision, if `base` is an id."""

    def rank_of(self, name: str) -> int:
        """Return the rank of a module's adapter."""
        return next((rank for pattern, rank in self.ranks if ends_like(name, [pattern])), self.rank)

    def to_bytes(
        self,
        targets: PeftTargets,
        *,
        fan_in_fan_out: bool = False,
        task: str | None = "CAUSAL_LM",
    ) -> bytes:
        """Return the file for adapters of these modules; some may keep (in, out) weights.

        `task` is PEFT's name of what the model does; None: it takes any model as it is. PEFT has
        no dropout beside a param, so a file with `targets.parameters` says 0.
        """
        fields = {
            "peft_type": "LORA",
            "task_type": task,
            "base_model_name_or_path": self.base,
            "revision": self.revision,
            "inference_mode": True,
            "r": self.rank,
            "lora_alpha": _short(self.alpha),
            "rank_pattern": {_expression(pattern): rank for pattern, rank in self.ranks},
            "alpha_pattern": {
                _expression(pattern): _short(alpha) for pattern, alpha in self.alphas
            },
            "lora_dropout": 0.0 if targets.parameters else self.dropout,
            "use_rslora": self.rslora,
            "use_dora": self.dora,
            "target_modules": list(targets.modules),
            "target_parameters": list(targets.parameters) or None,
            "bias": "none",
            "fan_in_fan_out": fan_in_fan_out,
            "init_lora_weights": True,
            "modules_to_save": list(self.saved) or None,
            "ensure_weight_tying": self.tied,
        }
        # In the order of patterns, of which PEFT takes the first that matches.
        return json.dumps(dict(sorted(fields.items())), indent=2).encode() + b"\n"


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
    _check_rank("r", rank)
    _check_alpha("lora_alpha", alpha)
    if not _is_number(dropout) or not 0 <= dropout < 1:
        raise _refusal(f"lora_dropout is {_shown(dropout)}; it must be from 0 to below 1")
    for key in ("use_rslora", "use_dora", "ensure_weight_tying"):
        if not isinstance(fields.get(key, False), bool):
            raise _refusal(f"{key} is {_shown(fields[key])}; it must be true or false")
    return PeftConfig(
        rank=rank,
        alpha=float(alpha),
        dropout=float(dropout),
        rslora=fields.get("use_rslora", False),
        dora=fields.get("use_dora", False),
        saved=_names(fields, "modules_to_save"),
        tied=fields.get("ensure_weight_tying", False),
        ranks=_by_pattern(fields, "rank_pattern", _check_rank),
        alphas=_by_pattern(fields, "alpha_pattern", _check_alpha),
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


def _check_rank(key: str, rank: Any) -> None:
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise _refusal(f"{key} is {_shown(rank)}; it must be a whole number from 1 to {MAX_RANK}")


def _check_alpha(key: str, alpha: Any) -> None:
    if not _is_number(alpha) or not 0 < alpha <= MAX_ALPHA:
        raise _refusal(f"{key} is {_shown(alpha)}; it must be a number above 0")


def _by_pattern(
    fields: dict[str, Any], key: str, check: Callable[[str, Any], None]
) -> tuple[tuple[str, Any], ...]:
    """Return what a file has for some modules, by our patterns.

    PEFT's are regular expressions, which may take for ever. Those that stand for names, with any
    characters in some places, are read; others are refused.
    """
    given = fields.get(key) or {}
    if not isinstance(given, dict):
        raise _refusal(f"{key} is {_shown(given)}; it must be an object")
    found = []
    for expression, value in given.items():
        if _EXPRESSION.fullmatch(expression) is None:
            raise _refusal(
                f"{key} has the key {expression[:80]!r}: of regular expressions only names are "
                "read, with .* for any characters. Write out the names of its modules"
            )
        check(f"{key} of {expression[:80]}", value)
        pattern = expression.removeprefix("^").removesuffix("$").replace(".*", "*")
        found.append((pattern.replace("\\.", "."), value))
    return tuple(found)


def _expression(pattern: str) -> str:
    """Return a pattern as the regular expression that PEFT looks for at the end of names."""
    return pattern.replace(".", r"\.").replace("*", ".*")


def _short(number: float) -> float:
    return int(number) if float(number).is_integer() else number


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
