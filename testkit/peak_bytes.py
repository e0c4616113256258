"""The most memory that this process held while something ran."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from megatrain.memory.host import resident_bytes

Result = TypeVar("Result")
LOOK_EVERY_S = 0.002


def peak_above(work: Callable[[], Result]) -> tuple[Result, int]:
    """Do `work`; return its result, and its peak of resident bytes above those before."""
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident_bytes())
            time.sleep(LOOK_EVERY_S)

    before = resident_bytes()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = work()
    finally:
        done.set()
        watcher.join()
    return result, peak - before
