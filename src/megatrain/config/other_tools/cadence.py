"""Evaluations and saves that other tools count in epochs or in shares of the run.

Here they are counted in steps. The steps of a run are known if its file gives them, or if its rows
are in files of this machine and are not packed; else the user sets the number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from megatrain.config.other_tools.asked import DroppedKey, ToolConfig
from megatrain.config.other_tools.defaults import ACCUMULATION, ROWS, count, defaults_of
from megatrain.config.quantities import read_number, read_whole

PER_EPOCH = {"evals_per_epoch": "eval.every", "saves_per_epoch": "save.every"}
_STRATEGIES = {
    "eval_strategy": "eval.every", "evaluation_strategy": "eval.every",
    "save_strategy": "save.every",
}  # fmt: skip
_STEPS = {"eval_steps": "eval.every", "save_steps": "save.every"}


def counted_in_epochs(key: str, asked: ToolConfig) -> str:
    """Return our key for a key that counts in epochs or shares of the run, else an empty string."""
    value = asked[key]
    if key in PER_EPOCH:
        return PER_EPOCH[key] if _number(value) > 0 else ""
    if key in _STRATEGIES:
        return _STRATEGIES[key] if value == "epoch" else ""
    if key in _STEPS and not any(asked.get(name) in ("no", "epoch", False) for name in _STRATEGIES
                                 if _STRATEGIES[name] == _STEPS[key]):  # fmt: skip
        return _STEPS[key] if 0 < _number(value) < 1 else ""
    return ""


def steps_between(key: str, asked: ToolConfig, sources: Sequence[Any], held_out: Any) -> int | None:
    """Return the steps for such a key, None if the steps of the run are not known."""
    epoch = _steps_of_an_epoch(asked, sources, held_out)
    epochs = _number(asked.given("num_train_epochs", asked.given("num_epochs", 0))) or _number(
        defaults_of(asked).get("num_train_epochs", defaults_of(asked).get("num_epochs"))
    )
    whole = whole_run(asked) or (math.ceil(epochs * epoch) if epoch else None)
    if key in _STRATEGIES:
        return epoch
    if not whole:
        return None
    share = 1 / (_number(asked[key]) * epochs) if key in PER_EPOCH else _number(asked[key])
    return max(math.ceil(Fraction(whole) * Fraction(share).limit_denominator(1 << 20)), 1)


def whole_run(asked: ToolConfig) -> int | None:
    """Return the steps that a file gives, None if its epochs decide."""
    steps = _number(asked.get("max_steps"))
    return int(steps) if steps > 0 else None


def _steps_of_an_epoch(asked: ToolConfig, sources: Sequence[Any], held_out: Any) -> int | None:
    paths = [source.get("path") if isinstance(source, dict) else source for source in sources]
    counts = [asked.num_rows_of(path) for path in paths if isinstance(path, str)]
    if not counts or None in counts:
        return None
    rows = sum(number for number in counts if number is not None)
    if isinstance(held_out, float):
        rows -= math.ceil(held_out * rows)
    key, default = ROWS[asked.tool]
    try:
        per_device, accumulated = (
            count(asked.given(key, default)),
            count(asked.given(ACCUMULATION, 1)),
        )
    except DroppedKey:
        return None
    return max(math.ceil(math.ceil(rows / (per_device * asked.num_gpus)) / accumulated), 1)


def _number(value: Any) -> float:
    for read in (read_whole, read_number):
        try:
            return read(value)
        except ValueError:
            continue
    return 0
