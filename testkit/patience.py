"""How long tests wait for threads and processes: until the event, and never by a clock.

A test that waits `HANG_S` fails because something hangs, not because the machine is busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 300.0


def eventually(condition: Callable[[], object]) -> bool:
    """Wait until the condition holds; return False if it hangs."""
    until = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(1e-3)
    return True
