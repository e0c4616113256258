"""Defaults of other tools that differ from ours."""

from __future__ import annotations

from typing import Any

from megatrain.config.other_tools.asked import Asks, Differs, DroppedKey, Tool, ToolConfig
from megatrain.config.quantities import read_tokens, read_whole

DEFAULTS: dict[Tool, dict[str, Any]] = {
    "LLaMA-Factory": {
        "learning_rate": 5e-5, "num_train_epochs": 3, "lr_scheduler_type": "linear",
        "adam_beta2": 0.999, "warmup_steps": 0, "cutoff_len": 2048, "packing": False,
        "finetuning_type": "lora", "lora_target": "all", "pref_loss": "sigmoid",
        "pref_beta": 0.1, "simpo_gamma": 0.5,
    },
    "Axolotl": {
        "adam_beta2": 0.999, "num_epochs": 1, "sequence_len": 512, "warmup_ratio": 0.03,
        "sample_packing": False, "rl_beta": 0.1,
    },
    "TRL": {
        "num_train_epochs": 3, "lr_scheduler_type": "linear", "adam_beta2": 0.999,
        "warmup_steps": 0, "max_length": 1024, "packing": False, "dataset_test_split": "test",
        "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": "PEFT",
    },
}  # fmt: skip
"""A tool's value for a key that is absent, null or dropped."""
BY_TRAINER: dict[str, dict[str, Any]] = {
    "sft": {
        "learning_rate": 2e-5, "assistant_only_loss": False, "router_aux_loss_coef": "model",
    },
    "dpo": {"learning_rate": 1e-6, "beta": 0.1, "router_aux_loss_coef": "model"},
    "kto": {
        "learning_rate": 1e-6, "beta": 0.1, "router_aux_loss_coef": "model",
        "train_sampling_strategy": "sequential",
    },
    "orpo": {"learning_rate": 1e-6, "beta": 0.1},
    "cpo": {"learning_rate": 1e-6, "beta": 0.1, "simpo_gamma": 0.5},
}  # fmt: skip
"""TRL's values that depend on the trainer."""
CPO_ALPHA = 1.0
"""Weight of the chosen answer's own loss in the simpo of TRL and Axolotl."""

REQUIRED: dict[Tool, dict[str, str]] = {
    "LLaMA-Factory": {},
    "Axolotl": {
        "learning_rate": "optim.learning_rate", "lora_r": "lora.rank", "lora_alpha": "lora.alpha",
        "simpo_gamma": "loss.gamma",
    },
    "TRL": {},
}  # fmt: skip
"""Keys without which a run of a tool does not start, and ours: the user sets them."""

ALWAYS: dict[Tool, dict[str, tuple[Any, str]]] = {
    "LLaMA-Factory": {
        "data.overlong": (
            "truncate",
            Differs("there prompt and answer of longer rows are cut in proportion; here the end"),
        )
    },
    "Axolotl": {},
    "TRL": {"data.overlong": ("truncate", "TRL always cuts longer rows at the end")},
}
"""Behavior of a tool without a key: our key, value and note."""

NULL_MEANS: dict[tuple[Tool, str], tuple[tuple[str, ...], str]] = {
    ("TRL", "max_length"): (
        ("data.max_length", "data.overlong"),
        Asks("there null never cuts a row: set data.max_length to the length of your longest row"),
    ),
}
"""Keys whose null is not the default: our keys that then keep their value, and why."""

ROWS: dict[Tool, tuple[str, int]] = {
    "LLaMA-Factory": ("per_device_train_batch_size", 8),
    "Axolotl": ("micro_batch_size", 1),
    "TRL": ("per_device_train_batch_size", 8),
}
"""The key that counts the rows of a micro-batch, and its default."""
ACCUMULATION = "gradient_accumulation_steps"


def defaults_of(asked: ToolConfig) -> dict[str, Any]:
    """Return the tool's values for keys that are absent, null or dropped."""
    return DEFAULTS[asked.tool] | BY_TRAINER.get(asked.trainer, {})


def batch(asked: ToolConfig, max_length: Any, *, packed: bool) -> tuple[str, int, str]:
    """Return our key for the batch, its value, and how it was computed.

    A row of a packed batch is a sequence that several rows fill, so the batch is counted in tokens.
    """
    key, default = ROWS[asked.tool]
    rows = count(asked.given(key, default))
    accumulated = count(asked.given(ACCUMULATION, 1))
    gpus = asked.num_gpus
    total = rows * accumulated * gpus
    made_of = f"{rows} rows x {accumulated} accumulated x {gpus} GPU{'s' * (gpus > 1)}"
    if not packed:
        return "train.batch_rows", total, made_of
    try:
        longest = read_tokens(max_length)
    except ValueError:
        raise DroppedKey(Asks("the longest row is not known")) from None
    note = f"{made_of} x {longest} tokens, packed: the step count depends on how rows fill them"
    return "train.batch_tokens", total * longest, note


def count(value: Any) -> int:
    """Return a number of rows or micro-batches, at least 1. Raises DroppedKey."""
    try:
        number = read_whole(value)
    except ValueError:
        raise DroppedKey(Asks("not an integer")) from None
    if number < 1:
        raise DroppedKey(f"{number} means that another key decides")
    return number
