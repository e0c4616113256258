"""The history of a run in a bucket: numbered entries, each made once, of which the last one counts.

    history/00000001.json   lease         a process may write from here on
    history/00000002.json   checkpoint    one is complete, and these are the ones that are kept
    history/00000003.json   release       the process has ended
    beats/00000001          changes while the process of lease 1 lives

An entry is made by a conditional put under the number after the last one it has read. Of two
processes one makes it; the other reads it, and knows that the run is no longer its own. This is the
lock, the fencing and the commit in one: a process that slept while another took the run over cannot
add a checkpoint, because its number is taken. Nothing is ever deleted from the history, and numbers
have no gaps, so the last entry is found by reading alone: a listing that is out of date harms
nothing.

A lease is that of a live process while its beat changes. No clocks are compared: who wants the run
watches the beat for LEASE_S by its own clock. A process of this machine that has ended is known.

Laws (tests/disk/remote/test_history.py)
    1. Of two processes that take a run, one gets it, and the other says who has it.
    2. After a run was taken over, its former process adds nothing: it gets RunTaken.
    3. A put whose answer was lost is one entry, and counts.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatrain.errors import CheckpointCorrupted, RunFolderError, RunTaken, StorageError
from megatrain.places import Place

BEAT_S, LEASE_S = 10.0, 60.0
"""Time between two beats, and without one until a process counts as dead."""
_FIRST = 1
_TOKEN = secrets.token_hex(8)
"""Identifies this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCheckpoint:
    """A checkpoint in a bucket, as the history has it."""

    name: str
    step: int
    lease: int
    """Number of the lease that its writer had."""
    sha256: str
    """Hash of the object that lists its files and chunks."""
    eval_loss: float | None = None

    @property
    def key(self) -> str:
        """The object that lists its files and chunks."""
        return f"checkpoints/{self.lease:08}/{self.name}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a history."""

    number: int
    kind: Literal["lease", "checkpoint", "release"]
    lease: int
    """Number of the entry that gave its writer the run."""
    who: Mapping[str, Any]
    nonce: str
    live: tuple[RemoteCheckpoint, ...]
    """The checkpoints that are kept from here on, the newest first."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()


def read_entry(place: Place, number: int) -> Entry | None:
    """Return an entry, None if there is none yet. Raises StorageError or CheckpointCorrupted."""
    key = _key(number)
    data = place.read(key)
    if data is None:
        return None
    try:
        fields = json.loads(data)
        live = tuple(RemoteCheckpoint(**one) for one in fields.pop("live"))
        entry = Entry(**fields, live=live)
        numbers = [entry.lease, *(n for one in live for n in (one.step, one.lease))]
        if entry.number != number or not isinstance(entry.who, dict):
            raise ValueError("it is another one")
        if any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError("its numbers are none")
        return entry
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupted(f"{place.url}/{key}: not an entry of a run: {error}") from None


def last_entry(place: Place) -> Entry | None:
    """Return the last entry, None if there is no run."""
    found, low, stride = None, 0, 1
    while (entry := read_entry(place, low + stride)) is not None:
        found, low, stride = entry, low + stride, 2 * stride
    high = low + stride
    while high - low > 1:
        middle = (low + high) // 2
        if (entry := read_entry(place, middle)) is None:
            high = middle
        else:
            found, low = entry, middle
    return found


class Lease:
    """The right to write a run in a bucket, until another process takes it over."""

    def __init__(self, place: Place, entry: Entry, before: Entry | None) -> None:
        self.place = place
        self.number = entry.number
        self.before = before
        """The entry that was the last one when the lease was taken."""
        self._last = entry
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.lost: str | None = None
        """Who has taken the run over; None while nobody has."""
        self._beating = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._beating.start()

    @property
    def live(self) -> tuple[RemoteCheckpoint, ...]:
        return self._last.live

    def commit(self, live: tuple[RemoteCheckpoint, ...]) -> None:
        """Make `live` the checkpoints of the run: when it returns, they are acknowledged.

        Raises RunTaken, or StorageError, after which it may be tried again.
        """
        self._add("checkpoint", live)

    def release(self) -> None:
        """Let others have the run at once. Raises StorageError or RunTaken."""
        self.stop()
        self._add("release", self.live)

    def stop(self) -> None:
        """End the beat: others may take the run over after a while."""
        self._ended.set()
        self._beating.join()

    def require(self) -> None:
        """Raise RunTaken if the run was taken over, as far as it is known."""
        if self.lost is not None:
            raise RunTaken(self.lost)

    def _add(
        self, kind: Literal["checkpoint", "release"], live: tuple[RemoteCheckpoint, ...]
    ) -> None:
        with self._lock:
            self.require()
            while True:
                entry = replace(
                    self._last,
                    number=self._last.number + 1,
                    kind=kind,
                    nonce=secrets.token_hex(8),
                    live=live,
                )
                if _made(self.place, entry):
                    self._last = entry
                    return
                if (taken := self._next()) is not None:
                    self._lose(taken)
                if self._last.number < entry.number:
                    raise StorageError(
                        f"{self.place.url}: entry {entry.number} is there, and is not"
                    )

    def _next(self) -> Entry | None:
        """Return an entry after the last one: of this process, if its answer was lost before."""
        found = read_entry(self.place, self._last.number + 1)
        while found is not None and found.lease == self.number:
            self._last = found
            found = read_entry(self.place, self._last.number + 1)
        return found

    def _lose(self, by: Entry) -> None:
        self.lost = (
            f"{self.place.url}: {described(by.who)} has taken this run over. What is "
            "saved on this machine alone is no longer a part of it; that process computes it again"
        )
        raise RunTaken(self.lost)

    def _beat(self) -> None:
        count = 0
        while True:
            count += 1
            try:
                self.place.write(f"beats/{self.number:08}", str(count).encode())
                if self._lock.acquire(blocking=False):
                    try:
                        taken = self._next()
                        if taken is not None:
                            self._lose(taken)
                    finally:
                        self._lock.release()
            except RunTaken:
                return
            except (StorageError, CheckpointCorrupted):
                pass  # a bucket that does not answer: the next beat may reach it
            if self._ended.wait(BEAT_S):
                return


def take(
    place: Place,
    *,
    say: Callable[[str], None] = lambda text: None,
    pause: Callable[[float], object] = time.sleep,
) -> Lease:
    """Return the right to write the run at a place.

    Waits for LEASE_S if its last process has not released it and may be alive. Raises
    RunFolderError if one is; StorageError.
    """
    last = last_entry(place)
    if last is not None and last.kind != "release" and not _is_gone(last.who):
        _wait_for_end(place, last, say, pause)
    number = _FIRST if last is None else last.number + 1
    entry = Entry(
        number=number,
        kind="lease",
        lease=number,
        who=this_process(),
        nonce=secrets.token_hex(8),
        live=() if last is None else last.live,
    )
    if not _made(place, entry):
        raise _in_use(place, read_entry(place, number))
    return Lease(place, entry, last)


def _wait_for_end(
    place: Place, last: Entry, say: Callable[[str], None], pause: Callable[[float], object]
) -> None:
    """Return when a lease has had no beat for LEASE_S. Raises RunFolderError at the first one."""
    beat = f"beats/{last.lease:08}"
    first = place.read(beat)
    say(
        f"{place.url}: {described(last.who)} was writing this run and did not release it; "
        f"waiting {LEASE_S:.0f} s for a sign of life"
    )
    until = time.monotonic() + LEASE_S
    while time.monotonic() < until:
        pause(min(BEAT_S / 2, max(0.0, until - time.monotonic())))
        if place.read(beat) != first or read_entry(place, last.number + 1) is not None:
            raise _in_use(place, last)


def _made(place: Place, entry: Entry) -> bool:
    """Make an entry; return whether it is there, also if the answer to an earlier try was lost."""
    data = entry.to_bytes()
    return place.write_new(_key(entry.number), data) or place.read(_key(entry.number)) == data


def _in_use(place: Place, by: Entry | None) -> RunFolderError:
    who = "another process" if by is None else described(by.who)
    return RunFolderError(
        f"{place.url}: {who} is writing this run. Wait for it, or set save.dir to another place."
    )


def _key(number: int) -> str:
    return f"history/{number:08}.json"


def this_process() -> dict[str, Any]:
    """Return what names this process among those of all machines."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "system": _system(),
        "token": _TOKEN,
    }


def described(who: Mapping[str, Any]) -> str:
    """Return a process in words."""
    return f"process {who.get('pid')} on {who.get('host')}"


def _system() -> str:
    """Return what tells one set of process numbers from another: the boot and the namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return secrets.token_hex(16)  # no process is then known to be gone


def _is_gone(who: Mapping[str, Any]) -> bool:
    """Return whether a process ran on this machine and has ended."""
    pid = who.get("pid")
    if who.get("system") != _system() or not isinstance(pid, int):
        return False
    if pid == os.getpid():  # the number is used again, unless it is this very process
        return who.get("token") != _TOKEN
    return not Path(f"/proc/{pid}").exists()
