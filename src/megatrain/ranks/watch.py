"""Heartbeats of all ranks in the run's store: a lost rank is named, and no process stays behind.

    thread pulse   about once a second: says our heartbeat, reads those of the others
    thread guard   waits; when a rank is lost and the process does not end by itself, ends it

A collective that fails says little: a connection was closed, a time ran out. `diagnose` waits for a
few heartbeats and says who is lost and why. A rank that dies without a trace, hangs, or is cut off
may leave others in a call that never returns. So once a rank is lost, or this one has failed, the
process has a grace period to end by itself; then it is ended, with the message on standard error.

Only thread pulse talks to the store, for a call may hang there. Its connection is its own.

Laws (tests/ranks/test_watch.py)
    1. A rank that failed is named with its error; one that died, hangs or is cut off by its host.
    2. A process whose rank or whose other rank is lost ends within the grace period, whatever its
       threads wait for. One that leaves, or whose others have all left, is not ended.
    3. Time in which this process itself was stopped is not the others' silence.
    4. Words in the store that are not a heartbeat are not heard, and end nothing.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch.distributed.distributed_c10d import Store

from megatrain.errors import RankLost
from megatrain.ranks.heartbeats import Beat, RankFault, Roll, begin, lost
from megatrain.ranks.ownership import Owner

BEAT_S = 1.0
PATIENCE = 5.0
"""Heartbeats that a diagnosis waits for."""
GRACE = 20.0
"""Heartbeats within which a process ends by itself."""

FAULTS = "watch/faults"


class Watch:
    """Watches all ranks for one of them, from its making until `close`."""

    def __init__(
        self,
        store: Store,
        owner: Owner,
        deadline_s: float,
        *,
        end: Callable[[str, int], None] | None = None,
    ) -> None:
        """Make another connection to `store`.

        `end` gets the last words and the exit code when the process has to be ended.
        """
        self._store: Any = store.clone()  # type: ignore[attr-defined]
        self._deadline_s = deadline_s
        self._beat_s = min(BEAT_S, deadline_s / 20)
        self._end = end or _end
        self._lock = threading.Lock()
        self._roll = Roll(owner, Beat(host=socket.gethostname(), pid=os.getpid()))
        self._joined: set[int] = set()
        self._said = threading.Condition(self._lock)
        self._num_said = 0
        self._beat_now = threading.Event()
        self._closing = threading.Event()
        self._ending: BaseException | None = None
        self._failure: BaseException | None = None
        self._pulse = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._guard = threading.Thread(target=self._keep, name="guard", daemon=True)
        self._pulse.start()
        self._guard.start()

    def begin(self, channel: str, doing: str) -> None:
        """Say that this rank begins its next collective on a channel.

        Raises RankLost if a rank is known to be lost: there is no point in waiting for it.
        """
        with self._lock:
            self._roll.own = begin(self._roll.own, channel, doing)
        if (again := self._known()) is not None:
            raise again

    def storing(self, call: str | None) -> None:
        """Say with the next heartbeats that this rank waits for a file call, or no longer."""
        with self._lock:
            self._roll.own = replace(self._roll.own, storing=call)

    def is_storing(self) -> bool:
        """Return whether another rank waits for a file call, so that this one waits for it.

        Raises RankLost if a rank is known to be lost.
        """
        if (again := self._known()) is not None:
            raise again
        with self._lock:
            return self._roll.is_storing

    def diagnose(self, error: BaseException) -> RankLost:
        """Return who is lost, given how a collective failed; wait for a few heartbeats."""
        if (again := self._known()) is not None:
            return again
        limit_s = (PATIENCE - 1.5) * self._beat_s
        cause = None
        for _ in range(round(PATIENCE)):
            if self._closing.wait(self._beat_s):
                break
            with self._lock:
                cause = self._roll.cause(limit_s)
            if cause is not None:
                break
        with self._lock:
            found = lost(cause or self._roll.suspicion(error))
            self._ending = self._ending or found
        return found

    def fail(self, error: BaseException) -> None:
        """Leave this rank's error for the others; take a few heartbeats at most.

        Rank 0 waits until all have read it: the store may end with its process.
        """
        with self._lock:
            self._ending = self._ending or error
            self._failure = self._failure or error
            self._say_now()
            leads = self._roll.owner.leads
        if leads:
            self._wait_for_readers()

    def close(self) -> None:
        """Leave: from now on nobody misses this rank, and it misses nobody.

        One that failed is guarded until its process ends.
        """
        with self._lock:
            if self._ending is not None:
                return
            self._roll.own = replace(self._roll.own, has_left=True)
            self._say_now()
        self._closing.set()
        self._beat_now.set()
        self._guard.join()
        self._pulse.join(PATIENCE * self._beat_s)

    def _known(self) -> RankLost | None:
        """Return the known loss as a new error: one that was raised carries where."""
        with self._lock:
            if isinstance(self._ending, RankLost):
                return RankLost(str(self._ending))
            return None if self._ending is None else lost(f"this rank failed: {self._ending}")

    def _say_now(self) -> None:
        """Wait, holding the lock, until a heartbeat that begins from now on was written."""
        count = self._roll.own.count + 1
        self._beat_now.set()
        self._said.wait_for(lambda: self._num_said >= count, PATIENCE * self._beat_s)

    def _wait_for_readers(self) -> None:
        """Wait until each rank that is heard has begun and ended a reading since now."""
        with self._lock:
            counts = self._roll.counts()
        for _ in range(round(4 * PATIENCE)):
            with self._lock:
                now = self._roll.counts()
            if all(now.get(rank, count + 2) >= count + 2 for rank, count in counts.items()):
                return
            self._closing.wait(self._beat_s / 4)

    def _beat(self) -> None:
        """Be thread pulse."""
        try:
            while not self._closing.is_set():
                self._beat_now.clear()
                self._say()
                self._hear()
                self._beat_now.wait(self._beat_s)
        except Exception as error:  # the store's; its connection cannot be used again
            with self._lock:
                self._roll.hear_store(error)

    def _say(self) -> None:
        with self._lock:
            own = self._roll.own = replace(self._roll.own, count=self._roll.own.count + 1)
            failure = self._failure
        if failure is not None and own.fault is None:
            fault = replace(RankFault.of(failure), number=self._store.add(FAULTS, 1))
            with self._lock:
                own = self._roll.own = replace(self._roll.own, fault=fault)
        self._store.set(_key(self._roll.owner.rank), own.to_json().decode())
        with self._said:
            self._num_said = own.count
            self._said.notify_all()

    def _hear(self) -> None:
        owner = self._roll.owner
        for rank in set(range(owner.size)) - {owner.rank} - self._joined:
            if self._store.check([_key(rank)]):  # to read it would wait for it
                self._joined.add(rank)
        joined = sorted(self._joined)
        beats = self._store.multi_get([_key(rank) for rank in joined]) if joined else []
        with self._lock:
            self._roll.hear_store()
            for rank, beat in zip(joined, beats, strict=True):
                with suppress(ValueError):  # somebody else wrote there; the next one is its own
                    self._roll.hear(rank, Beat.from_json(beat))

    def _keep(self) -> None:
        """Be thread guard."""
        before, grace_s = time.monotonic(), GRACE * self._beat_s
        while not self._closing.wait(self._beat_s):
            now = time.monotonic()
            # Not more than this: if it took longer, it was this process that was stopped.
            passed, before = min(now - before, 2 * self._beat_s), now
            with self._lock:
                self._roll.wait(passed)
                if self._ending is None and (cause := self._roll.cause(self._deadline_s)):
                    self._ending = lost(cause)
                ending = self._ending
            if ending is None:
                continue
            grace_s -= passed
            if grace_s < 0:
                self._end(f"{type(ending).__name__}: {ending}", getattr(ending, "exit_code", 1))
                return


def _key(rank: int) -> str:
    return f"watch/rank {rank}"


def _end(text: str, code: int) -> None:
    os.write(sys.stderr.fileno(), f"{text}\n".encode())
    os._exit(code)
