"""Defaults of other tools that differ from ours."""

from __future__ import annotations

from typing import Any

from megatrain.config.other_tools.asked import DroppedKey, Tool, ToolConfig
from megatrain.config.quantities import read_tokens, read_whole

DEFAULTS: dict[Tool, dict[str, Any]] = {
    "LLaMA-Factory": {
        "learning_rate": 5e-5, "num_train_epochs": 3, "lr_scheduler_type": "linear",
        "adam_beta2": 0.999, "warmup_steps": 0, "cutoff_len": 2048, "packing": False,
        "finetuning_type": "lora", "pref_loss": "sigmoid", "pref_beta": 0.1, "simpo_gamma": 0.5,
    },
    "Axolotl": {
        "adam_beta2": 0.999, "num_epochs": 1, "sequence_len": 512, "warmup_ratio": 0.03,
        "sample_packing": False, "rl_beta": 0.1, "simpo_gamma": 0.5,
    },
    "TRL": {
        "learning_rate": 2e-5, "num_train_epochs": 3, "lr_scheduler_type": "linear",
        "adam_beta2": 0.999, "warmup_steps": 0, "max_length": 1024, "packing": False,
        "assistant_only_loss": False, "dataset_test_split": "test",
        "router_aux_loss_coef": "model", "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05,
        "loss_type": "nll", "beta": 0.1, "simpo_gamma": 0.5,
    },
}  # fmt: skip
"""A tool's value for a key that is absent, null or dropped."""

ALWAYS: dict[Tool, dict[str, tuple[Any, str]]] = {
    "LLaMA-Factory": {
        "data.overlong": (
            "truncate",
            "there prompt and answer of longer rows are cut in proportion; here the end",
        )
    },
    "Axolotl": {},
    "TRL": {"data.overlong": ("truncate", "TRL always cuts longer rows at the end")},
}
"""Behavior of a tool without a key: our key, value and note."""

NULL_MEANS: dict[tuple[Tool, str], tuple[tuple[str, ...], str]] = {
    ("TRL", "max_length"): (
        ("data.max_length", "data.overlong"),
        "there null never cuts a row: set data.max_length to the length of your longest row",
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


def batch(asked: ToolConfig, max_length: Any, *, packed: bool) -> tuple[str, int, str]:
    """Return our key for the batch, its value, and how it was computed.

    A row of a packed batch is a sequence that several rows fill, so the batch is counted in tokens.
    """
    key, default = ROWS[asked.tool]
    rows = _count(asked.given(key, default))
    accumulated = _count(asked.given(ACCUMULATION, 1))
    gpus = asked.num_gpus
    total = rows * accumulated * gpus
    made_of = f"{rows} rows x {accumulated} accumulated x {gpus} GPU{'s' * (gpus > 1)}"
    if not packed:
        return "train.batch_rows", total, made_of
    try:
        longest = read_tokens(max_length)
    except ValueError:
        raise DroppedKey("the longest row is not known") from None
    note = f"{made_of} x {longest} tokens, packed: the step count depends on how rows fill them"
    return "train.batch_tokens", total * longest, note


def _count(value: Any) -> int:
    try:
        number = read_whole(value)
    except ValueError:
        raise DroppedKey("not an integer") from None
    if number < 1:
        raise DroppedKey(f"{number} means that another key decides")
    return number
