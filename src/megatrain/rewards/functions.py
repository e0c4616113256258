"""Reward functions of the user, each in a process of its own, with a time limit.

    with RewardFunctions(settings) as functions:      # starts them; a file that is wrong is refused
        found = functions(rows, texts, ended)         # found.total: one reward for each text

A function gets rows as their file has them and the texts that were drawn, and returns a number for
each text; one with a parameter `ended` also gets which texts were not cut off. All functions work
at a time. One that raises, loops, dies or returns anything but finite numbers ends in a RewardError
that names it; its process is gone then, and so are those that it has started. What it prints is
printed.

Laws (tests/rewards/test_functions.py)
    1. The reward is the weighted sum of what the functions return, in the order of texts.
    2. Whatever a function does, the caller gets rewards or one RewardError in time.
    3. No process is left after `close`, or after a failure.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatrain.config.sections import RewardFunction, RewardSettings
from megatrain.errors import RewardError
from megatrain.rewards import worker

_PIECE_BYTES = 1 << 16
_LOADING_S = 60.0
"""Least time to import a file: it may import torch."""
_ENDING_S = 5.0
"""Time that a process takes to end once its pipes are closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Rewards for texts."""

    total: tuple[float, ...]
    """The weighted sum of all functions, by text."""
    means: Mapping[str, float]
    """The mean of each function, without its weight, by its name."""


class RewardFunctions:
    """The functions of a config. Close it when done."""

    def __init__(self, settings: RewardSettings) -> None:
        """Start all, and wait until each is loaded. Raises RewardError."""
        self._timeout_s = settings.timeout
        self._workers: list[_Worker] = []
        try:
            for given in settings.functions:
                self._workers.append(_Worker(given))
            limit_s = max(self._timeout_s, _LOADING_S)
            until = time.monotonic() + limit_s
            for one in self._workers:
                one.answer(until, limit_s)
        except BaseException:
            self.close()
            raise

    def __call__(
        self, rows: Sequence[Mapping[str, Any]], texts: Sequence[str], ended: Sequence[bool]
    ) -> Rewards:
        """Return the rewards for texts, each the answer to its row. Raises RewardError."""
        given = {"rows": list(rows), "texts": list(texts), "ended": list(ended)}
        asked = json.dumps(given, default=str)
        until = time.monotonic() + self._timeout_s
        try:
            for one in self._workers:
                one.ask(asked, until, self._timeout_s)
            found = [one.answer(until, self._timeout_s)["rewards"] for one in self._workers]
        except BaseException:
            self.close()
            raise
        weights = [one.given.weight for one in self._workers]
        names = _names([one.given for one in self._workers])
        return Rewards(
            total=tuple(
                sum(
                    weight * rewards[number] for weight, rewards in zip(weights, found, strict=True)
                )
                for number in range(len(texts))
            ),
            means={
                name: sum(rewards) / max(1, len(rewards))
                for name, rewards in zip(names, found, strict=True)
            },
        )

    def close(self) -> None:
        """End all processes; a second call does nothing."""
        for one in self._workers:
            one.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EnvironmentFunction:
    """A generator function of the user, in a process of its own. Close it when done."""

    def __init__(self, function: str, timeout_s: float) -> None:
        """Start it, and wait until it is loaded. Raises RewardError."""
        self._timeout_s = timeout_s
        self._worker = _Worker(RewardFunction(function=function), "environment")
        try:
            limit_s = max(timeout_s, _LOADING_S)
            self._worker.answer(time.monotonic() + limit_s, limit_s)
        except BaseException:
            self.close()
            raise

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Begin a rollout for each row. Raises RewardError."""
        self._asked({"begin": list(rows)})

    def tell(self, answers: Sequence[tuple[int, str]]) -> list[tuple[int, Any, float | None]]:
        """Return what rollouts are told after their answers. Raises RewardError."""
        return [tuple(one) for one in self._asked({"answers": list(answers)})["told"]]

    def _asked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        try:
            until = time.monotonic() + self._timeout_s
            self._worker.ask(json.dumps(given, default=str), until, self._timeout_s)
            return self._worker.answer(until, self._timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process; a second call does nothing."""
        self._worker.end()


def _names(functions: Sequence[RewardFunction]) -> list[str]:
    """Return the name of each function; with its file if two have the same."""
    names = [one.name for one in functions]
    return names if len(set(names)) == len(names) else [one.function for one in functions]


class _Worker:
    """One function's process, in a process group of its own."""

    def __init__(self, given: RewardFunction, kind: str = "reward function") -> None:
        self.given, self._kind = given, kind
        path, _, name = given.function.rpartition(":")
        if not Path(path).is_file():
            raise self._failed(f"there is no file {Path(path).absolute()}")
        self._process = subprocess.Popen(
            [sys.executable, worker.__file__, path, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        os.set_blocking(
            self._process.stdin.fileno(), False
        )  # one that does not read must not hang us
        self._heard = b""

    def ask(self, asked: str, until: float, limit_s: float) -> None:
        """Send a line. Raises RewardError if it is not read in time."""
        assert self._process.stdin is not None
        left = memoryview(asked.encode() + b"\n")
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdin, selectors.EVENT_WRITE)
            while left:
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise self._late(limit_s)
                try:
                    left = left[os.write(self._process.stdin.fileno(), left) :]
                except OSError:
                    raise self._failed(self._gone()) from None

    def answer(self, until: float, limit_s: float) -> dict[str, Any]:
        """Return the next line that it says. Raises RewardError for an error, or none in time."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._heard:
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise self._late(limit_s)
                piece = os.read(self._process.stdout.fileno(), _PIECE_BYTES)
                if not piece:
                    raise self._failed(self._gone())
                self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise self._failed(said["error"])
        return said

    def end(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process.wait()

    def _gone(self) -> str:
        try:
            code = self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            return "closed the pipes of its process, and can say nothing any more"
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"ended its process {how}"

    def _late(self, limit_s: float) -> RewardError:
        return self._failed(
            f"has not returned within {limit_s:g} s (rewards.timeout); does it loop, or wait for "
            "something? Its process was ended"
        )

    def _failed(self, text: str) -> RewardError:
        return RewardError(f"the {self._kind} {self.given.function} {text}")
