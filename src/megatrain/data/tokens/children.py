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
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType

from megatrain.errors import DataError

_START_LIMIT_S = 300.0


def require_children(*, needs_program: bool = True) -> None:
    """Raise DataError unless this program can start processes.

    Not `needs_program`: they do not import the caller's program, which may be a notebook or a
    script without a guard.
    """
    child = multiprocessing.get_context("spawn").Process(target=_end)
    with nullcontext() if needs_program else program_hidden():
        child.start()
    child.join(_START_LIMIT_S)
    if child.exitcode != 0:
        child.kill()
        child.join()
        raise DataError(
            f"a child process could not start (exit code {child.exitcode}); its output is above. "
            "Child processes import the program that starts them: if that is your own script, put "
            'its code under `if __name__ == "__main__":`.'
        )


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
