"""The first use of a chat template, in a child process with a limit of time and memory.

A template is a program from an untrusted folder. Its sandbox lets it loop without end and
build strings without limit; here that costs a child process and not the run.

It also checks that child processes can start, before any gets much data: multiprocessing writes
arguments into a pipe, and if the child ends before it has read them, the write never returns.

Laws (tests/data/chat/test_probe.py)
    1. A template that does not end, or not within its memory, is a DataError. Its time is the
       processor's: on a busy machine it may wait.
    2. So are child processes that cannot start, as those of a script that cannot be imported.
    3. A child that does not need the program never imports it (tests/data/rows/test_in_memory.py).
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from types import ModuleType
from typing import Any

from megatrain.data.chat.template import ChatTemplate
from megatrain.data.rows.rows import Row
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import DataError

LIMIT_S = 30
"""Seconds of processor time: a busy machine must not refuse a good template."""
_PATIENCE = 20
"""Seconds of the clock for each second of processor time."""
_START_LIMIT_S = 300.0
_LIMIT_BYTES = 8 * 2**30
_BEGUN, _READY = b"begun", b"ready"


def probe_template(
    tokenizer: Any,
    row: Row,
    kwargs: Mapping[str, Any] | None = None,
    limit_s: int = LIMIT_S,
    *,
    needs_program: bool = True,
) -> None:
    """Render one conversation in a child, which has `limit_s` of processor time for it.

    Not `needs_program`: the child does not import the caller's program, which may be a notebook or
    a script without a guard.

    Waits for the child. A template that raises is not an error here: its rows are counted later.
    Raises DataError if the child did not start or had to be killed.
    """
    child, pipe = _begun(_render_once, needs_program=needs_program)
    with pipe, suppress(OSError, EOFError):  # it has ended: its exit code shows how
        pipe.send((tokenizer, row, dict(kwargs or {}), limit_s))
        _await(_READY, pipe, child)
    child.join(_PATIENCE * limit_s)
    if child.exitcode in (None, -signal.SIGXCPU):
        child.kill()
        child.join()
        raise DataError(
            f"the chat template did not finish one conversation in {limit_s} s of processor time; "
            "it may loop without end. Check it, or set data.chat_template to another."
        )
    if child.exitcode != 0:
        raise DataError(
            f"the chat template ended its process with code {child.exitcode} on one conversation "
            f"(memory is limited to {_LIMIT_BYTES >> 30} GiB there). Check it, or set another."
        )


def require_children(*, needs_program: bool = True) -> None:
    """Raise DataError unless this program can start processes, which import it or do not."""
    child, pipe = _begun(_begin, needs_program=needs_program)
    pipe.close()
    child.join()


def _begun(
    work: Callable[[connection.Connection], None], *, needs_program: bool = True
) -> tuple[SpawnProcess, Any]:
    """Return a child that has started `work`, and our end of the pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs,))
    with nullcontext() if needs_program else program_hidden():
        child.start()
    theirs.close()
    try:
        _await(_BEGUN, ours, child)
    except (OSError, EOFError):
        child.kill()
        child.join()
        raise DataError(
            f"a child process could not start (exit code {child.exitcode}); its output is above. "
            "Child processes import the program that starts them: if that is your own script, put "
            'its code under `if __name__ == "__main__":`.'
        ) from None
    return child, ours


@contextmanager
def program_hidden() -> Iterator[None]:
    """Let `__main__` be empty while a child learns what to import."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _await(word: bytes, pipe: Any, child: SpawnProcess) -> None:
    """Wait for a message of the child. Raises EOFError or OSError if it ended, or is too late."""
    # On a busy machine a process may take longer to start than a template to render.
    connection.wait([pipe, child.sentinel], _START_LIMIT_S)
    if not pipe.poll():
        raise EOFError
    assert pipe.recv_bytes() == word


def _begin(pipe: connection.Connection) -> None:
    pipe.send_bytes(_BEGUN)


def _render_once(pipe: connection.Connection) -> None:
    _begin(pipe)
    tokenizer, row, kwargs, limit_s = pipe.recv()
    pipe.send_bytes(_READY)
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = math.ceil(used.ru_utime + used.ru_stime) + limit_s
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the signal of the next one leaves a core
    resource.setrlimit(resource.RLIMIT_CPU, (until, until + 1))
    if sys.platform != "darwin":  # macOS refuses such a limit; the limit of time holds there too
        resource.setrlimit(resource.RLIMIT_AS, (_LIMIT_BYTES, _LIMIT_BYTES))
    try:
        ChatTemplate(tokenizer, kwargs).render(row)
    except BadRow as bad:
        if isinstance(bad.__cause__, MemoryError):
            raise SystemExit(3) from None
