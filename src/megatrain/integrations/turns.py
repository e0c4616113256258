"""Tasks that run in turns, and are answered together where they call a model.

A trainer computes the loss of one micro-batch after another, each by code of its own that calls the
model somewhere in its middle. The engine wants all micro-batches of a step at once. So each loss
is a task in a thread of its own: it runs as far as its call, then the next one does, and when all
have called, one pass answers them. Exactly one thread runs at a time, and the code of each task
runs once, in the order it was written.

Laws (tests/integrations/test_turns.py)
    1. One task runs at a time; results are those of one after another.
    2. Calls that train are answered together, once no task waits for one that does not.
    3. An error of a task, or of the answer, ends all of them and is raised.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from megatrain.batch import MicroBatch
from megatrain.losses.leaves import TokenOutputs

_here = threading.local()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A micro-batch that a task wants the leaves of."""

    model: Any
    """Calls of equal models are answered together."""
    micro: MicroBatch
    trains: bool
    """Whether a gradient will go back."""


Answer = Callable[[Sequence[Call]], Sequence[TokenOutputs]]
"""Gives the leaves of calls of one model that all train, or all do not."""


def take_turns(
    tasks: Sequence[Callable[[], Any]],
    answer: Answer,
    *,
    one_by_one: bool = False,
    before: Callable[[int], None] = lambda task: None,
) -> list[Any]:
    """Run the tasks; return their results.

    With `one_by_one`, a task begins when the one before waits to train, or has ended: for tasks
    that make what the next one reads. `before` gets a task's number each time it is to run.
    """
    turns: list[_Turn] = []
    try:
        for number, task in enumerate(tasks):
            turns.append(turn := _Turn(task, partial(before, number)))
            turn.begin()
            while one_by_one and turn.call is not None and not turn.call.trains:
                (leaves,) = answer([turn.call])
                turn.go_on(leaves)
        while calls := [(turn, turn.call) for turn in turns if turn.call is not None]:
            now = [(turn, call) for turn, call in calls if not call.trains] or calls
            now = [(turn, call) for turn, call in now if call.model is now[0][1].model]
            found = answer([call for _, call in now])
            for (turn, _), leaves in zip(now, found, strict=True):
                turn.go_on(leaves)
        return [turn.result for turn in turns]
    finally:
        for turn in turns:
            turn.end()


def ask(call: Call, answer: Answer) -> TokenOutputs:
    """Return the leaves of a call: in a task, when it is its turn again; elsewhere at once."""
    turn: _Turn | None = getattr(_here, "turn", None)
    if turn is not None:
        return turn.wait_for(call)
    (leaves,) = answer([call])
    return leaves


def is_in_turn() -> bool:
    """Return whether a task is running."""
    return hasattr(_here, "turn")


class _Ended(BaseException):
    """Another task failed: nobody waits for this one any more."""


class _Turn:
    """A task in its thread. The caller waits while it runs."""

    def __init__(self, task: Callable[[], Any], before: Callable[[], None]) -> None:
        self._task = task
        self._before = before
        self._said: SimpleQueue[Call | None] = SimpleQueue()
        self._heard: SimpleQueue[TokenOutputs | None] = SimpleQueue()
        self._error: BaseException | None = None
        self.result: Any = None
        self.call: Call | None = None
        """What it waits for; None: it has ended."""
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), daemon=True)

    def begin(self) -> None:
        """Let it run as far as its first call."""
        self._before()
        self._thread.start()
        self._listen()

    def go_on(self, leaves: TokenOutputs) -> None:
        """Answer its call, and let it run as far as the next."""
        self._before()
        self._heard.put(leaves)
        self._listen()

    def end(self) -> None:
        """End the thread, if it waits."""
        if self._thread.is_alive():
            self._heard.put(None)
            self._thread.join()

    def _listen(self) -> None:
        self.call = self._said.get()
        if self.call is None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def wait_for(self, call: Call) -> TokenOutputs:
        """Say what the task wants, and wait until it is there. Called in its thread."""
        self._said.put(call)
        leaves = self._heard.get()
        if leaves is None:
            raise _Ended
        return leaves

    def _run(self) -> None:
        _here.turn = self
        try:
            self.result = self._task()
        except BaseException as error:
            self._error = error
        finally:
            self._said.put(None)
