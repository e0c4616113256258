"""Reward functions of the user, for TRL's trainers: named on the command line, never by a config.

    megatrain train run.yaml --rewards rewards.py:correct --rewards rewards.py:short=0.1

They have TRL's signature: they get `prompts`, `completions`, `completion_ids` and the columns of
the rows by name, and return a number, or None, for each completion. They run in the process that
trains.

Invariants (tests/integrations/test_reward_functions.py)
    1. A function that fails, or returns anything but finite numbers, is a RewardError with its name
       and the line of the user's file.
    2. Nothing in a config is imported or run.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.errors import ConfigError, RewardError


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A function of a file, and its weight in the sum of all rewards."""

    path: Path
    name: str
    weight: float
    function: Callable[..., Any]

    @property
    def __name__(self) -> str:
        """The name by which TRL logs it."""
        return self.name

    def __call__(self, *, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Return a reward for each completion. Raises RewardError."""
        try:
            found = self.function(completions=completions, **columns)
        except Exception as error:
            raise self._error(f"raised {_in_words(error, self.path)}") from error
        if isinstance(found, str | bytes) or not hasattr(found, "__iter__"):
            raise self._error(f"returned {found!r:.80}; return a list with a number for each")
        rewards = list(found)
        if len(rewards) != len(completions):
            raise self._error(f"returned {len(rewards)} rewards for {len(completions)} completions")
        return [self._checked(number, reward) for number, reward in enumerate(rewards)]

    def _checked(self, number: int, reward: Any) -> float | None:
        """Return a reward as a number; None: the function does not apply to the completion."""
        if reward is None:
            return None
        if not hasattr(reward, "__float__") or not math.isfinite(float(reward)):
            raise self._error(
                f"returned {reward!r:.80} for completion {number}; return a finite number"
            )
        return float(reward)

    def _error(self, what: str) -> RewardError:
        return RewardError(f"the reward function {self.path}:{self.name} {what}")


def load_reward_functions(names: Sequence[str]) -> list[RewardFunction]:
    """Return the functions of `FILE.py:NAME` or `FILE.py:NAME=WEIGHT`.

    Raises ConfigError for a name that is none, and RewardError for a file that cannot be imported.
    """
    if not names:
        raise ConfigError(
            "nothing rewards the answers. Give a function of a file: --rewards rewards.py:correct"
        )
    found: list[RewardFunction] = []
    for given in names:
        place, _, weight = given.partition("=")
        file, _, name = place.rpartition(":")
        try:
            factor = float(weight or 1.0)
        except ValueError:
            factor = math.nan
        if not file.endswith(".py") or not name.isidentifier() or not math.isfinite(factor):
            raise ConfigError(
                f"--rewards {given}: rewards.py:correct is one, and with a weight "
                "rewards.py:short=0.1"
            )
        if not Path(file).is_file():
            raise ConfigError(f"--rewards {given}: there is no file {file} in {Path.cwd()}.")
        function = getattr(_module(Path(file)), name, None)
        if not callable(function):
            raise ConfigError(f"--rewards {given}: {file} has no function {name}.")
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"--rewards {given}: {name} is async. Give a plain function.")
        found.append(RewardFunction(path=Path(file), name=name, weight=factor, function=function))
    return found


def _module(path: Path) -> Any:
    """Return the module of a file, imported once. Its folder is where it finds others."""
    real = path.resolve()
    if str(real.parent) not in sys.path:
        sys.path.insert(0, str(real.parent))
    known = sys.modules.get(real.stem)
    if known is not None and getattr(known, "__file__", None) == str(real):
        return known
    spec = importlib.util.spec_from_file_location(real.stem, real)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[real.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[real.stem]
        raise RewardError(f"{path} cannot be loaded: {_in_words(error, path)}") from error
    return module


def _in_words(error: BaseException, path: Path) -> str:
    """Return an error with the last line of the user's file in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).name == path.name]
    where = f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {str(error)[:400]}{where}"
