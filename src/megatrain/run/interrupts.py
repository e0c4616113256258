"""Requests to a run while it trains: to stop early, and to save.

Interrupts are signals, and memory that runs out. The first signal asks: the step is finished, the
state saved, and the process ends with 130. The second one ends the run at once; earlier saves stay
complete. While no step is active (data and model are being read, or the model is exported) the
first one is obeyed at once too. A signal that the caller lets us ignore, as nohup does, stays
ignored.

With a notice, the time from SIGTERM to the end of the machine, a step is not always finished: it is
left in time to save what is new, and at the end of the notice the process ends, whatever hangs.

Ranks get a signal more than once: a scheduler sends it to all, and the launcher passes it on. With
`shared`, signals within a few seconds are one request. And since a launcher ends all ranks as soon
as one has ended, signals are ignored once the block is over: the process is about to end itself.

A `Pause` is Ctrl-C in a program that trains: `train()` can be called again. An interrupt inside of
a step would end the lanes, and the trainer with them. So the first Ctrl-C is noted, and
KeyboardInterrupt is raised between two steps, where all blocks are updated. A second one is raised
at once. This holds only where Ctrl-C would raise KeyboardInterrupt: a handler of the program's own
stays.

`Requests` may be made of any rank and reach all: they go along with the result of a step
(`Engine.step`), or are agreed on where there was none. All ranks then act on the same words, so
that none ever goes another way.

Laws (tests/run/test_interrupts.py, test_pause.py, test_requests.py)
    1. One signal ends a run with a checkpoint of a complete step, two end it at once.
    2. Outside of the `with` block signals do what they did before; those to ranks do nothing.
    3. Nothing but the reason changes inside of a step, even if the terminal is gone.
    4. No library turns a signal into its own error: the run ends as Interrupted.
    5. A run that was paused once and continued ends in the bits of one that was not. Outside of the
       block, and where the program handles Ctrl-C itself, nothing changes.
    6. A process that got SIGTERM with a notice has ended when that is over
       (tests/run/test_notice.py).
    7. One rank's reason to end is that of all, and so is rank 0's wish to save. Between two
       hearings no rank of several changes its mind, whatever signals arrive.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from megatrain.errors import Interrupted
from megatrain.memory.host import free_bytes, resident_bytes
from megatrain.memory.ledger import gib
from megatrain.ranks.ranks import RankInfo, Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEAST_FREE_BYTES, LEAST_FREE_SHARE = 384 << 20, 0.015
"""Below both, the second of all we may use, the kernel may soon kill. A run is planned with a share
of 0.04 free."""
_WATCH_S = 1.0
_NOTICE_WATCH_S = 0.05
_LAST_SHARE = 0.03
"""Share of a notice that the system needs to end a process."""
_TOO_LATE = b"\nthe notice is over, and not all was saved. Earlier checkpoints stay complete.\n"
SAME_REQUEST_S = 5.0
"""Signals to ranks within this time are one request."""


class _Stop(KeyboardInterrupt):
    """A signal to be obeyed at once. Code that catches every Exception lets it pass."""


class Interrupts:
    """Listens to signals and watches free memory inside a `with` block of the main thread."""

    def __init__(
        self,
        free: Callable[[], int] = free_bytes,
        least_free_bytes: int | None = None,
        *,
        shared: bool = False,
        speaks: bool = True,
    ) -> None:
        """`shared`: this process is one of several ranks, of which one `speaks`."""
        self._shared = shared
        self._speaks = speaks
        self._asked_s = 0.0
        self.reason: str | None = None
        """Why the run should end after this step; None while it should not."""
        self.notice_s: float | None = None
        """Time from SIGTERM to the end of the machine; None: it waits."""
        self.needs_s: float | None = None
        """Time that leaving a step, saving and sending take; None: not known."""
        self._until_s: float | None = None
        """When the machine ends."""
        self.patient = False
        """Whether there is a step to finish; else a signal ends the `with` block at once."""
        self._stopped: str | None = None
        self._signaled = False
        self._free = free
        share = int(LEAST_FREE_SHARE * (free() + resident_bytes()))
        self._least = min(LEAST_FREE_BYTES, share) if least_free_bytes is None else least_free_bytes
        self._before: dict[int, Any] = {}
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._signaled and self._shared and self._is_same_request():
            return
        if self._signaled:
            os._exit(Interrupted.exit_code)
        self._asked_s = time.monotonic()  # first: another signal may come after any line
        self.reason = self.reason or name
        self._signaled = True
        if number == signal.SIGTERM and self.notice_s is not None:
            self._until_s = self._asked_s + self.notice_s
        if not self.patient:
            self._stopped = f"{name}: stopped while no step was active; nothing was lost"
            raise _Stop(self._stopped)
        if not self._speaks:
            return
        # Not print: the signal may have come inside of one.
        again = " again" if number == signal.SIGINT else ""
        text = f"\n{name}: finishing this step and saving. Press Ctrl-C{again} to stop immediately."
        if self._until_s is not None:
            text = f"\n{name}: leaving this step in time and saving, within {self.notice_s:g} s."
        with suppress(OSError, ValueError):  # the terminal has hung up, or there is none
            os.write(sys.stderr.fileno(), f"{text}\n".encode())

    def _is_same_request(self) -> bool:
        return time.monotonic() - self._asked_s < SAME_REQUEST_S

    def leaves(self) -> bool:
        """Return whether the active step must be left now, so that there is time to save."""
        if self._until_s is None:
            return False
        needs_s = self.notice_s if self.needs_s is None else self.needs_s
        return time.monotonic() >= self._until_s - (needs_s or 0.0)

    @property
    def left_s(self) -> float | None:
        """Time until the machine ends; None: it waits."""
        return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_S if self.notice_s is None else _NOTICE_WATCH_S):
            if self.left_s is not None and self.left_s < _LAST_SHARE * (self.notice_s or 0.0):
                with suppress(OSError, ValueError):
                    os.write(sys.stderr.fileno(), _TOO_LATE)
                os._exit(Interrupted.exit_code)
            free = self._free()
            if free < self._least and self.reason is None and self.patient:
                self.reason = (
                    f"only {gib(free)} of host memory are free, and the kernel would soon kill"
                )
                return

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._receive)
        self._watcher = threading.Thread(target=self._watch, name="memory watch", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self._ended.set()
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._shared else handler)
        assert self._watcher is not None
        self._watcher.join()
        if error is not None and self._stopped is not None:
            raise Interrupted(self._stopped) from error


_SAID = "\nCtrl-C: finishing this step. Press it again to stop immediately.\n"


class Pause:
    """Notes one Ctrl-C inside a `with` block of the main thread."""

    def __init__(self, *, listens: bool) -> None:
        """`listens`: false if somebody else listens to Ctrl-C."""
        self._listens = listens
        self._listening = False
        self.is_asked = False

    def raise_if_asked(self, step: int) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed since the block began."""
        if self.is_asked:
            self.is_asked = False
            raise KeyboardInterrupt(f"stopped after step {step}; train() continues from there")

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
        # Not print: the signal may have come inside of one. A notebook has no such descriptor.
        with suppress(OSError, ValueError, AttributeError):
            os.write(sys.stderr.fileno(), _SAID.encode())

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._listening = self._listens and is_main and is_usual
        self.is_asked = False
        if self._listening:
            signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        if self._listening:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class Requests:
    """Requests to the ranks of a run."""

    def __init__(
        self,
        ranks: Ranks,
        interrupts: Interrupts,
        wants_save: Callable[[], bool],
        has_stalled: Callable[[], bool],
    ) -> None:
        """`wants_save` returns, on rank 0, whether the state should be saved now.

        `has_stalled` returns, on each rank, whether its storage does not answer.
        """
        self._ranks = ranks
        self._interrupts = interrupts
        self._wants_save = wants_save
        self._has_stalled = has_stalled
        self.storage_stalled = False
        """Whether storage did not answer on some rank, when the ranks last asked each other."""
        self.stop: str | None = None
        """Why the run should end; None while it should not."""
        self._save = False

    def says(self) -> RankInfo:
        """Return the requests to this rank, for the others."""
        asks = self._ranks.leads and not self._ranks.owner.is_alone
        return {
            "stop": self._interrupts.reason,
            "save": asks and self._wants_save(),
            "stalled": self._has_stalled(),
        }

    def hear(self, said: Sequence[RankInfo]) -> None:
        """Take up the requests to all ranks."""
        reasons = [(rank, one["stop"]) for rank, one in enumerate(said) if one["stop"] is not None]
        if reasons:
            rank, reason = reasons[0]
            self.stop = f"rank {rank}: {reason}" if rank else str(reason)
        self._save = self._save or bool(said[0]["save"])
        self.storage_stalled = any(one["stalled"] for one in said)

    def save(self) -> bool:
        """Return whether to save now; a process alone finds out when it is asked."""
        if self._ranks.owner.is_alone:
            return self._wants_save()
        saves, self._save = self._save, False
        return saves

    def ask(self) -> None:
        """Ask all ranks now."""
        self.hear(self._ranks.agree(self.says()))

    def refresh(self) -> None:
        """Ask again if that costs nothing: ranks have just asked each other with their step."""
        if self._ranks.owner.is_alone:
            self.ask()
