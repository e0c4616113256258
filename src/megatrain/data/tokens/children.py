"""Child processes that tokenize: whether they can start, and what they import.

multiprocessing writes a child's work into a pipe. If the child ends before it has read that, the
write never returns; so a child without work goes first.

Laws (tests/data/tokens/test_children.py)
    1. Child processes that cannot start, as those of a script that cannot be imported, are a
       DataError.
    2. A child that does not need the program never imports it (tests/data/rows/test_in_memory.py).
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from tempfile import TemporaryFile
from types import ModuleType

from megatrain.errors import DataError

_START_LIMIT_S = 300.0
_UNGUARDED = "finished its bootstrapping phase"
"""Words of the error of a child that starts a process while it imports the program."""


def require_children(*, needs_program: bool = True) -> None:
    """Raise DataError unless this program can start processes.

    Not `needs_program`: they do not import the caller's program, which may be a notebook or a
    script without a guard.
    """
    child = multiprocessing.get_context("spawn").Process(target=_end)
    resource_tracker.ensure_running()  # it lives on, and keeps the stderr that it starts with
    with TemporaryFile() as output:
        with nullcontext() if needs_program else program_hidden(), stderr_into(output.fileno()):
            child.start()
        child.join(_START_LIMIT_S)
        if child.exitcode == 0:
            return
        child.kill()
        child.join()
        output.seek(0)
        printed = output.read().decode(errors="replace")
    guard = 'put its code under `if __name__ == "__main__":`.'
    if _UNGUARDED in printed:  # Python's own explanation of that has 40 lines
        raise DataError(f"child processes import the program that starts them: {guard}")
    sys.stderr.write(printed)
    raise DataError(
        f"a child process could not start (exit code {child.exitcode}); its output is above. "
        f"Child processes import the program that starts them: if that is your own script, {guard}"
    )


@contextmanager
def stderr_into(file: int) -> Iterator[None]:
    """Let processes that start meanwhile write their errors into a file."""
    own = os.dup(2)
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


def _end() -> None:
    pass


@contextmanager
def program_hidden() -> Iterator[None]:
    """Let `__main__` be empty while a child learns what to import."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program
