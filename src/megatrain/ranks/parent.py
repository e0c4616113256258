"""A rank ends when its launcher does, however that ended.

`megatrain train --gpus` says its process id in the environment. On Linux a rank asks the system
for SIGTERM at the launcher's death. The launcher may have died before that, while this process was
starting: then the parent is another one, and the rank sends the signal to itself. Elsewhere a rank
that has joined ends because the store is gone (megatrain/ranks/watch.py).

Laws (tests/ranks/test_parent.py)
    1. A process whose launcher dies, or was dead before it asked, gets SIGTERM.
    2. What the process starts itself is told of no launcher.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

LAUNCHER = "MEGATRAIN_LAUNCHER"
_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Let this process get SIGTERM when its launcher dies, if it has one. Of the main thread."""
    launcher = os.environ.pop(LAUNCHER, None)
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if str(os.getppid()) != launcher:
        os.kill(os.getpid(), signal.SIGTERM)
