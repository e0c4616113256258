"""Reasons to stop a run early: signals, and memory that runs out.

The first signal asks: the step is finished, the state saved, and the process ends with 130. The
second one ends the run at once; earlier saves stay complete. While no step is active (data
and model are being read, or the model is exported) the first one is obeyed at once too. A signal
that the caller lets us ignore, as nohup does, stays ignored.

Ranks get a signal more than once: a scheduler sends it to all, and the launcher passes it on. With
`shared`, signals within a few seconds are one request. And since a launcher ends all ranks as soon
as one has ended, signals are ignored once the block is over: the process is about to end itself.

Laws (tests/run/test_interrupts.py)
    1. One signal ends a run with a checkpoint of a complete step, two end it at once.
    2. Outside of the `with` block signals do what they did before; of ranks, nothing.
    3. Nothing but the reason changes inside of a step, even if the terminal is gone.
    4. No library turns a signal into its own error: the run ends as Interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from megatrain.errors import Interrupted
from megatrain.memory.host import free_bytes, resident_bytes
from megatrain.memory.ledger import gib

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEAST_FREE_BYTES, LEAST_FREE_SHARE = 384 << 20, 0.015
"""Below both, the second of all we may use, the kernel may soon kill. A run is planned with a share
of 0.04 free."""
_WATCH_S = 1.0
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
        self._shared, self._speaks, self._asked_s = shared, speaks, 0.0
        self.reason: str | None = None
        """Why the run should end after this step; None while it should not."""
        self.patient = False
        """Whether there is a step to finish; else a signal ends the `with` block at once."""
        self._stopped: str | None = None
        self._signalled = False
        self._free = free
        share = int(LEAST_FREE_SHARE * (free() + resident_bytes()))
        self._least = min(LEAST_FREE_BYTES, share) if least_free_bytes is None else least_free_bytes
        self._before: dict[int, Any] = {}
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._signalled and self._shared and self._is_same_request():
            return
        if self._signalled:
            os._exit(Interrupted.exit_code)
        self._signalled, self.reason, self._asked_s = True, self.reason or name, time.monotonic()
        if not self.patient:
            self._stopped = f"{name}: stopped while no step was active; nothing was lost"
            raise _Stop(self._stopped)
        if not self._speaks:
            return
        # Not print: the signal may have come inside of one.
        text = f"\n{name}: finishing this step and saving. Press Ctrl-C again to stop immediately."
        with suppress(OSError, ValueError):  # the terminal has hung up, or there is none
            os.write(sys.stderr.fileno(), f"{text}\n".encode())

    def _is_same_request(self) -> bool:
        return time.monotonic() - self._asked_s < SAME_REQUEST_S

    def _watch(self) -> None:
        while not self._ended.wait(_WATCH_S):
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
