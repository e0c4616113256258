"""Standard output and error that may go away while a verb works.

Who reads a pipe may leave early (`megatrain train ... | head`), and a file may fill its disk.
Neither is a reason to stop training. The first failed write sends the rest to nowhere; a reader who
left has seen enough, and any other loss is an error once the verb is done.

Laws (tests/test_output.py)
    1. No write to a lost stream raises.
    2. A reader who left changes no exit code; a disk that is full is a DiskError at the end.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from megatrain.errors import DiskError
from megatrain.files import send_to_nowhere


class Output:
    """A text stream whose writes do not fail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.loss: OSError | None = None
        """Why what was written last went nowhere."""

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.loss = self.loss or error
        send_to_nowhere(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Let print and all others write to streams that do not fail. Raises DiskError at the end."""
    before = sys.stdout, sys.stderr
    streams = [None if stream is None else Output(stream) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before
    out = streams[0]
    if out is not None and out.loss is not None and out.loss.errno != errno.EPIPE:
        reason = out.loss.strerror or out.loss
        raise DiskError(f"cannot write to standard output: {reason}. What it lacks is lost.")


def say_last(text: str) -> None:
    """Print to standard error, if it is still there."""
    with suppress(OSError):  # the terminal is gone: the exit code still tells
        print(text, file=sys.stderr)
