"""What each tool does without being asked, where we would do something else."""

from __future__ import annotations

from typing import Any

from megatrain.config.other_tools.asked import Asked, Dropped, Tool
from megatrain.config.quantities import read_tokens, read_whole

DEFAULTS: dict[Tool, dict[str, Any]] = {
    "LLaMA-Factory": {
        "learning_rate": 5e-5, "num_train_epochs": 3, "lr_scheduler_type": "linear",
        "adam_beta2": 0.999, "warmup_steps": 0, "cutoff_len": 2048, "packing": False,
    },
    "Axolotl": {
        "adam_beta2": 0.999, "num_epochs": 1, "sequence_len": 512, "warmup_ratio": 0.03,
        "sample_packing": False,
    },
    "TRL": {
        "learning_rate": 2e-5, "num_train_epochs": 3, "lr_scheduler_type": "linear",
        "adam_beta2": 0.999, "warmup_steps": 0, "max_length": 1024, "packing": False,
        "assistant_only_loss": False, "dataset_test_split": "test",
        "router_aux_loss_coef": "model",
    },
}  # fmt: skip
"""What a tool takes for a key that is absent, null or not to be kept."""

ALWAYS: dict[Tool, dict[str, tuple[Any, str]]] = {
    "LLaMA-Factory": {
        "data.overlong": (
            "truncate",
            "longer rows are cut there too, but prompt and answer in proportion; here the end",
        )
    },
    "Axolotl": {},
    "TRL": {"data.overlong": ("truncate", "longer rows are cut at the end there, always")},
}
"""What a tool does and has no key for: our key, value and note."""

NULL_MEANS: dict[tuple[Tool, str], tuple[tuple[str, ...], str]] = {
    ("TRL", "max_length"): (
        ("data.max_length", "data.overlong"),
        "null never cuts a row there: give data.max_length the length of your longest row",
    ),
}
"""Keys whose null is not the default: the keys of ours that are then left alone, and why."""

ROWS: dict[Tool, tuple[str, int]] = {
    "LLaMA-Factory": ("per_device_train_batch_size", 8),
    "Axolotl": ("micro_batch_size", 1),
    "TRL": ("per_device_train_batch_size", 8),
}
"""The key that counts the rows of a micro-batch, and its default."""
ACCUMULATION = "gradient_accumulation_steps"


def batch(asked: Asked, max_length: Any, *, packed: bool) -> tuple[str, int, str]:
    """Return our key for the batch, its value, and how it comes about.

    A row of a packed batch is a sequence that several rows fill, so it is counted in tokens.
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
        raise Dropped("the longest row is not known") from None
    note = f"{made_of} x {longest} tokens, packed: how many steps depends on how rows fill them"
    return "train.batch_tokens", total * longest, note


def _count(value: Any) -> int:
    try:
        number = read_whole(value)
    except ValueError:
        raise Dropped("not a whole number") from None
    if number < 1:
        raise Dropped(f"{number} means that another key decides")
    return number
