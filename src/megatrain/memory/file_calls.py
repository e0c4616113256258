"""File calls that may never return, made by threads that can be left behind.

A call to a disk or a network file system may hang for minutes or for good, and nothing in the
process can end it. So the thread that must go on makes no such call itself:

    calls = FileCalls(limit_s=150.0)
    done = calls.submit(work)      # one of a few threads does it, in the order of submission
    calls.result(done)             # its result, or StorageTimeout
    calls.do(work)                 # the same on a thread of its own, at once

Once a call is out for longer than the limit, all calls of this object are given up: work that was
not begun never is, and every wait raises StorageTimeout. The threads that hang return when the
system lets them. Only then are descriptors closed, by `afterwards`: the number of a descriptor that
is closed under a hanging call could come to mean another file.

Without a limit, waits last as long as they take, and `do` calls directly.

Laws (tests/memory/test_file_calls.py)
    1. No wait lasts longer than the limit after the last progress; the error names call and file.
    2. Nothing is begun after the calls were given up, except what `afterwards` was given.
    3. What `afterwards` was given is done once no thread is inside a call any more.
    4. A process ends although a call of it hangs.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast

from megatrain.errors import DiskError, StorageTimeout
from megatrain.files import call_of

Result = TypeVar("Result")
POLLS = 20
"""Looks at the calls within the limit."""
MOST_POLL_S = 1.0


class FileCalls:
    """A few threads for file calls, of which each may hang."""

    def __init__(self, limit_s: float | None = None, *, num_threads: int = 3) -> None:
        self._limit_s = limit_s
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._inside: dict[int, float] = {}
        """Threads that are doing work, each with the time at which it began."""
        self._num_open = 0
        """Pieces of work that were submitted and have not ended."""
        self._stalled: StorageTimeout | None = None
        self._late: list[Callable[[], object]] = []
        self._cleaner: threading.Thread | None = None
        self._threads = [
            threading.Thread(target=self._serve, name=f"file call {number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_given_up(self) -> bool:
        return self._stalled is not None

    def raise_if_given_up(self) -> None:
        """Raise StorageTimeout if work that was begun should not go on."""
        if self._stalled is not None:
            raise self._again()

    @property
    def out(self) -> str | None:
        """The call of given-up work that is still running, in words; None if all have returned."""
        with self._changed:
            if self._stalled is None or self._cleaner is None:
                return None
            since, call = self._oldest()
        if call is None:
            return "storage answers again; the remains of a save are being removed"
        return f"{_storage()}: {call} has not returned for {time.monotonic() - since:.0f} s"

    def submit(
        self, work: Callable[[], Result], dropped: Callable[[], object] = bool
    ) -> Future[Result]:
        """Let a thread do `work`; `dropped` is called afterwards if it never comes to that."""
        future: Future[Result] = Future()

        def begin() -> Result:
            if self.is_given_up:
                self.afterwards(dropped)
            self.raise_if_given_up()
            return work()

        with self._changed:
            self._num_open += 1
        self._waiting.put(lambda: self._act(future, begin, bool))
        return future

    def do(self, work: Callable[[], Result], undo: Callable[[Result], object] = bool) -> Result:
        """Return the result of `work`. `undo` gets a result that comes too late."""
        if self._limit_s is None:
            return work()
        self._raise_if_stalled()
        future: Future[Result] = Future()
        with self._changed:
            self._num_open += 1
        act = partial(self._act, future, work, undo)
        threading.Thread(target=act, name="file call", daemon=True).start()
        return self.result(future)

    def result(self, future: Future[Result]) -> Result:
        """Return the result of submitted work. Raises StorageTimeout, or what the work raised."""
        self.wait(lambda seconds: bool(wait([future], seconds).done))
        return future.result()

    def wait(self, attempt: Callable[[float | None], bool]) -> None:
        """Call `attempt`, which waits for some seconds at most, until it returns True.

        None is for as long as it takes. Raises StorageTimeout.
        """
        if self._limit_s is None:
            attempt(None)
            return
        poll_s = min(MOST_POLL_S, self._limit_s / POLLS)
        while not attempt(poll_s):
            self._raise_if_stalled()

    def drain(self) -> None:
        """Return when all submitted work has ended. Raises StorageTimeout."""

        def ended(seconds: float | None) -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: not self._num_open, seconds)

        self.wait(ended)

    def afterwards(self, work: Callable[[], object]) -> None:
        """Do `work` when the last of the calls that were given up has returned."""
        with self._changed:
            self._late.append(work)
            if self._cleaner is None:
                self._cleaner = threading.Thread(target=self._clean, name="late", daemon=True)
                self._cleaner.start()

    def close(self) -> None:
        """Let the threads go: they end when their work has."""
        for _ in self._threads:
            self._waiting.put(None)
        if self._stalled is None:
            for thread in self._threads:
                thread.join()

    def _serve(self) -> None:
        while (act := self._waiting.get()) is not None:
            act()
            del act  # it may hold memory

    def _act(
        self,
        future: Future[Result],
        work: Callable[[], Result],
        undo: Callable[[Result], object],
    ) -> None:
        thread = threading.get_ident()
        with self._changed:
            self._inside[thread] = time.monotonic()
        result: Result | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with self._changed:  # at once: whether it came in time, and that it came
            if failure is not None:
                future.set_exception(failure)
            else:
                future.set_result(cast(Result, result))
                if self._stalled is not None:
                    self._late.append(partial(undo, cast(Result, result)))
            del self._inside[thread]
            self._num_open -= 1
            self._changed.notify_all()

    def _oldest(self) -> tuple[float, str | None]:
        """Return the time of the last progress of the slowest thread, and what it is doing.

        A thread that has made no call since it began may wait for one that has.
        """
        named: list[tuple[float, str | None]] = []
        others: list[tuple[float, str | None]] = []
        for thread, began in self._inside.items():
            call, since = call_of(thread) or ("", 0.0)
            if since >= began:
                named.append((since, call))
            else:
                others.append((began, "a file call"))
        return min(named or others, default=(time.monotonic(), None))

    def _raise_if_stalled(self) -> None:
        assert self._limit_s is not None
        with self._changed:
            if self._stalled is None:
                since, call = self._oldest()
                if call is None or time.monotonic() - since <= self._limit_s:
                    return
                self._stalled = StorageTimeout(
                    f"{_storage()}: {call} has not returned within {self._limit_s:g} s"
                )
        self.afterwards(bool)
        raise self._again()

    def _again(self) -> StorageTimeout:
        """Return the error anew: one that was raised carries where."""
        return StorageTimeout(str(self._stalled))

    def _clean(self) -> None:
        """Be the thread that waits for the calls that hang, and cleans up behind them."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._inside)
                if not self._late:
                    self._cleaner = None
                    return
                late, self._late = self._late, []
            for work in late:
                with suppress(DiskError, OSError):  # the folder may be gone by now
                    work()


def _storage() -> str:
    return f"storage has stalled on {socket.gethostname()}"
