"""Standard output and error that may close while a command runs.

The reader of a pipe may close it early (`megatrain train ... | head`), and a disk may fill up.
Neither is a reason to stop training. The first failed write discards the rest; a reader
that left has seen enough, and any other loss is an error at the end of the command.

Laws (tests/test_output.py)
    1. No write to a lost stream raises.
    2. A closed pipe does not change the exit code; a full disk is a DiskError at the end.
    3. With a label nothing goes to stdout, and each line of stderr has it once.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from megatrain.errors import DiskError
from megatrain.files import send_to_nowhere
from megatrain.text import printable


class Output:
    """A text stream whose writes do not fail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.loss: OSError | None = None
        """Why the last write was lost."""

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


class Labeled(Output):
    """A stream whose lines begin with a label."""

    def __init__(self, stream: TextIO, label: str) -> None:
        super().__init__(stream)
        self._label, self._begins = label, True

    def write(self, text: str) -> int:
        super().write(text[:0])  # refuses bytes, by which libraries find out what a stream takes
        for line in text.splitlines(keepends=True):
            super().write(f"{self._label}{line}" if self._begins else line)
            self._begins = line.endswith("\n")
        return len(text)


class Unheard(Output):
    """A stream that nobody reads."""

    def write(self, text: str) -> int:
        super().write(text[:0])  # refuses bytes
        return len(text)


@contextmanager
def lasting_output(label: str | None = None) -> Iterator[None]:
    """Replace stdout and stderr by streams that do not fail. Raises DiskError at the end.

    With a `label` another process prints the results: of this one only errors are printed, with
    the label before each line.
    """
    before = sys.stdout, sys.stderr
    streams = [None if stream is None else Output(stream) for stream in before]
    if label is not None:
        out, error = before
        streams = [
            None if out is None else Unheard(out),
            None if error is None else Labeled(error, label),
        ]
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
        raise DiskError(f"cannot write to standard output: {reason}. Part of the output is lost.")


def say_last(text: str) -> None:
    """Print to standard error, if it is still open. The text may quote a row."""
    with suppress(OSError):  # the terminal is gone: the exit code still shows the failure
        print(printable(text), file=sys.stderr)
