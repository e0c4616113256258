"""Ctrl-C in a program that trains: the step is finished, and `train()` can be called again.

An interrupt inside of a step would end the lanes, and the trainer with them. So the first Ctrl-C is
noted, and KeyboardInterrupt is raised between two steps, where all blocks are updated. A second one
is raised at once. Only where Ctrl-C would raise KeyboardInterrupt: a handler of the program's own
stays.

Laws (tests/run/loop/test_pause.py)
    1. A run that was interrupted once and continued ends in the bits of one that was not.
    2. Outside of the block, and where the program handles Ctrl-C itself, nothing changes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Self

_SAID = "\nCtrl-C: finishing this step. Press it again to stop immediately.\n"


class Pause:
    """Notes one Ctrl-C inside a `with` block of the main thread."""

    def __init__(self, *, listens: bool) -> None:
        """Not `listens`: somebody else does."""
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
        self._listening, self.is_asked = self._listens and is_main and is_usual, False
        if self._listening:
            signal.signal(signal.SIGINT, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        if self._listening:
            signal.signal(signal.SIGINT, signal.default_int_handler)
