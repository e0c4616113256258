"""Adapters and preference losses of other tools: which keys turn them on, and what values mean.

Keys of adapters count only where another key turns adapters on, and those of a loss only where it
is that loss; elsewhere they are dropped. A file whose keys name a method that MegaTrain does not
have is refused by that name: a run with another method would not be that of the file.
"""

from __future__ import annotations

from typing import Any

from megatrain.config.other_tools.asked import (
    Asks,
    Converter,
    Differs,
    DroppedKey,
    NoSuchMethod,
    ToolConfig,
)
from megatrain.config.other_tools.peft_targets import peft_targets
from megatrain.config.other_tools.trainers import NO_REWARD_MODEL, ONLY, trained_loss, why

PEFT = "PEFT"
"""In place of a list of modules: PEFT chooses them by the model's type."""
NO_ADAPTERS = "adapters are off, every weight is trained"
EXACT_BASE = Differs("the base is not quantized: it is streamed as it is")
_RANKS = {"LLaMA-Factory": ("lora_rank", 8), "Axolotl": ("lora_r", 8), "TRL": ("lora_r", 16)}
"""The key of the rank, and its default."""
_LOSSES = {
    "LLaMA-Factory": {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"},
    "Axolotl": {"dpo": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"},
}
"""Our losses, by what pref_loss and rl call them."""
_STAGES = {"sft": "next_token", "pt": "next_token", "kto": "kto"}
_OTHER_LOSSES = ("use_dft_loss", "use_asft_loss", "use_eaft_loss")
_OFF = (None, False, "", "none", "false")
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
        raise DroppedKey(NO_ADAPTERS)
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
    if value == PEFT:
        return peft_targets(asked)
    listed = value.split(",") if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise DroppedKey(Asks("not a list of names: set lora.targets"))
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
        raise DroppedKey(Asks("give one adapter: several are not merged"))
    return listed[0], ""


def require_method(asked: ToolConfig) -> None:
    """Raise NoSuchMethod if a file names a loss or a kind of adapter that MegaTrain lacks."""
    asked_loss(asked)
    if asked.tool == "LLaMA-Factory":
        kind = asked.given("finetuning_type", "lora")
        if kind == "freeze":
            raise NoSuchMethod(
                "finetuning_type", kind, "set it to full here, and list frozen params in "
                "model.frozen of the new file"
            )  # fmt: skip
        if kind not in ("lora", "full"):
            raise NoSuchMethod("finetuning_type", kind, "lora is the only kind of adapter")
        for key in _OTHER_LOSSES:
            if asked.get(key) not in _OFF:
                raise NoSuchMethod(key, asked[key], ONLY)
    if asked.tool == "Axolotl":
        if asked.get("adapter") not in (*_OFF, "lora", "qlora"):
            raise NoSuchMethod("adapter", asked["adapter"], "lora is the only kind of adapter")
        for key in ("reward_model", "process_reward_model"):
            if asked.get(key) not in _OFF:
                raise NoSuchMethod(key, asked[key], NO_REWARD_MODEL)


def asked_loss(asked: ToolConfig) -> str:
    """Return our name of the loss that a config trains with. Raises NoSuchMethod."""
    if asked.tool == "TRL":
        return trained_loss(asked)
    if asked.tool == "LLaMA-Factory":
        stage = str(asked.given("stage", "sft"))
        if stage in _STAGES:
            return _STAGES[stage]
        if stage != "dpo":
            raise NoSuchMethod("stage", stage, why(stage))
        return _named_loss("pref_loss", asked.given("pref_loss", "sigmoid"), asked)
    if asked.get("rl") in _OFF:
        return "next_token"
    found = _named_loss("rl", asked["rl"], asked)
    kinds = asked.get("dpo_loss_type") if found == "dpo" else None
    if kinds is None:
        return found
    listed = kinds if isinstance(kinds, list) else [kinds]
    ours = {"sigmoid": "dpo", "ipo": "ipo"}.get(str(listed[0])) if len(listed) == 1 else None
    if ours is None:
        raise NoSuchMethod("dpo_loss_type", ", ".join(map(str, listed)), f"give one loss; {ONLY}")
    return ours


def _named_loss(key: str, value: Any, asked: ToolConfig) -> str:
    found = _LOSSES[asked.tool].get(str(value))
    if found is None:
        raise NoSuchMethod(key, value, why(str(value)))
    return found


def _loss_name(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    found = asked_loss(asked)
    if found == "next_token":
        raise DroppedKey("the loss is that of the next token, as by default here")
    return found, ""


def note_on_cpo_alpha(alpha: Any, asked: ToolConfig) -> str:
    """Return a note on the chosen answer's own loss, which TRL adds to simpo by this weight."""
    if asked_loss(asked) != "simpo":
        return "it belongs to simpo"
    if alpha in (0, "0", "0.0"):
        return "off, as here"
    return Differs(
        f"there the loss of simpo has {alpha} x the chosen answer's own loss too; here it has none"
    )


def _trl_block(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    """Return beta of Axolotl's block for TRL; its other keys are those of rewards."""
    if asked_loss(asked) == "next_token" or not isinstance(value, dict) or "beta" not in value:
        raise DroppedKey("its keys are those of rewards")
    return value["beta"], "its beta, which wins over rl_beta"


def _rl_beta(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    block = asked.get("trl")
    if isinstance(block, dict) and block.get("beta") is not None:
        raise DroppedKey("overridden by beta of trl")
    return _of_losses(*_WITH_BETA)(value, asked)


def _of_losses(*names: str) -> Converter:
    """Return a converter for a key of some losses; `names` are ours."""

    def convert(value: Any, asked: ToolConfig) -> tuple[Any, str]:
        if asked_loss(asked) not in names:
            raise DroppedKey(f"it belongs to {' and '.join(names)}: set loss.name to train so")
        return value, ""

    return convert


def _orpo_alpha(value: Any, asked: ToolConfig) -> tuple[Any, str]:
    if asked.get("rl_beta") is not None:
        raise DroppedKey("overridden by rl_beta")
    return _rl_beta(value, asked)


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
    "rl_beta": _rl_beta,
    "trl": _trl_block,
    "dpo_loss_type": _loss_name,
    "dpo_beta": _of_losses("dpo", "ipo"),
    "beta": _of_losses(*_WITH_BETA),
    "orpo_alpha": _orpo_alpha,
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
