"""Run a command in this process group, and end the whole group when it or our starter has ended.

    python guarded.py COMMAND...      with a pipe as its input, whose other end the starter has

A server that was killed leaves its engine and its worker behind, and a trainer that was killed its
server: neither can clean up. The system closes the pipe of a process however that ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading


def main() -> None:
    """Wait for the command."""
    threading.Thread(target=_end_with_starter, daemon=True).start()
    subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
    _end_group()


def _end_with_starter() -> None:
    os.read(sys.stdin.fileno(), 1)  # nobody writes: it returns when the other end is closed
    _end_group()


def _end_group() -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
