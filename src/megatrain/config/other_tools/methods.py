"""Adapters and preference losses of other tools: which keys turn them on, and what values mean.

Keys of adapters count only where another key turns adapters on, and those of a loss only where it
is that loss; elsewhere they are dropped.
"""

from __future__ import annotations

from typing import Any

from megatrain.config.other_tools.asked import Converter, DroppedKey, ToolConfig
from megatrain.config.other_tools.names import NO_METHOD

NO_ADAPTERS = "adapters are off, every weight is trained"
EXACT_BASE = "the base is not quantized: it is streamed as it is"
_RANKS = {"LLaMA-Factory": ("lora_rank", 8), "Axolotl": ("lora_r", 8), "TRL": ("lora_r", 16)}
"""The key of the rank, and its default."""
_LOSSES = {
    "nll": "next_token", "sigmoid": "dpo", "dpo": "dpo", "ipo": "ipo",
    "orpo": "orpo", "simpo": "simpo", "kto": "kto",
}  # fmt: skip
"""Names of losses elsewhere, and ours."""
_WITH_BETA = ("dpo", "ipo", "orpo", "simpo", "kto")


def uses_adapters(asked: ToolConfig) -> bool:
    """Return whether a config trains adapters."""
    if asked.tool == "LLaMA-Factory":
        return bool(asked.given("finetuning_type", "lora") == "lora")
    if asked.tool == "Axolotl":
        return asked.get("adapter") in ("lora", "qlora") or bool(asked.get("lora_model_dir"))
    return bool(asked.get("use_peft"))


def _turned_on(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return the rank, for the key that turns adapters on."""
    if not uses_adapters(asked):
        if value in ("full", False, None):
            raise DroppedKey(NO_ADAPTERS)
        if value == "freeze":
            raise DroppedKey("list frozen params in model.frozen")
        raise DroppedKey(f"{value}: lora is the only kind of adapter")
    _refuse_beside_folder(asked)
    key, default = _RANKS[asked.tool]
    return asked.given(key, default), EXACT_BASE if value == "qlora" else ""


def _refuse_beside_folder(asked: ToolConfig) -> None:
    if asked.get("adapter_name_or_path") or asked.get("lora_model_dir"):
        raise DroppedKey("the folder of the adapter that training starts from has its own")


def _if_on(convert: Converter) -> Converter:
    """Return the converter for a key that counts only where adapters are on."""

    def checked(value: Any, asked: ToolConfig) -> tuple[Any, str]:
        if not uses_adapters(asked):
            raise DroppedKey(NO_ADAPTERS)
        if convert is not _started_from:
            _refuse_beside_folder(asked)
        return convert(value, asked)

    return checked


def _kept(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    return value, ""


def _targets(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return the names of modules: a list, or text with commas."""
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise DroppedKey("not a list of names")
    names = [name.strip() for name in listed if name.strip()]
    if any(name in ("all", "all-linear") for name in names):
        return ["all-linear"], ""
    return names, ""


def _every_linear(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if not value:
        raise DroppedKey("off: lora_target_modules decides")
    return ["all-linear"], ""


def _started_from(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) != 1:
        raise DroppedKey("give one adapter: several are not merged")
    return listed[0], ""


def asked_loss(asked: ToolConfig) -> str:
    """Return our name of the loss that a config trains with."""
    if asked.tool == "LLaMA-Factory":
        stage = str(asked.given("stage", "sft"))
        if stage == "dpo":
            return _LOSSES.get(str(asked.given("pref_loss", "sigmoid")), "")
        return {"kto": "kto", "sft": "next_token", "pt": "next_token"}.get(stage, "")
    if asked.tool == "Axolotl":
        return _LOSSES.get(str(asked.given("rl", "nll")), "")
    if {"desirable_weight", "undesirable_weight"} & set(asked):
        return "kto"
    return _LOSSES.get(str(asked.given("loss_type", "nll")), "")


def _loss_name(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    found = asked_loss(asked)
    if found == "next_token":
        raise DroppedKey("the loss is that of the next token, as by default here")
    if not found:
        raise DroppedKey(f"{value}: {NO_METHOD}")
    return found, ""


def _of_losses(*names: str) -> Converter:
    """Return a converter for a key of some losses; `names` are ours."""

    def convert(value: Any, asked: ToolConfig) -> tuple[Any, str]:
        if asked_loss(asked) not in names:
            raise DroppedKey(f"it belongs to {' and '.join(names)}: set loss.name to train so")
        return value, ""

    return convert


METHODS: dict[str, Converter] = {
    "finetuning_type": _turned_on,
    "adapter": _turned_on,
    "use_peft": _turned_on,
    "lora_rank": _if_on(_kept),
    "lora_r": _if_on(_kept),
    "lora_alpha": _if_on(_kept),
    "lora_dropout": _if_on(_kept),
    "lora_target": _if_on(_targets),
    "lora_target_modules": _if_on(_targets),
    "lora_target_linear": _if_on(_every_linear),
    "use_rslora": _if_on(_kept),
    "peft_use_rslora": _if_on(_kept),
    "adapter_name_or_path": _if_on(_started_from),
    "lora_model_dir": _if_on(_started_from),
    "pref_loss": _loss_name,
    "rl": _loss_name,
    "loss_type": _loss_name,
    "pref_beta": _of_losses(*_WITH_BETA),
    "rl_beta": _of_losses(*_WITH_BETA),
    "dpo_beta": _of_losses("dpo", "ipo"),
    "beta": _of_losses(*_WITH_BETA),
    "orpo_alpha": _of_losses("orpo"),
    "simpo_gamma": _of_losses("simpo"),
    "label_smoothing": _of_losses("dpo", "simpo"),
    "dpo_label_smoothing": _of_losses("dpo"),
    "desirable_weight": _of_losses("kto"),
    "undesirable_weight": _of_losses("kto"),
    "kto_chosen_weight": _of_losses("kto"),
    "kto_rejected_weight": _of_losses("kto"),
    "kto_desirable_weight": _of_losses("kto"),
    "kto_undesirable_weight": _of_losses("kto"),
}
"""Converters by key of the other tool."""
