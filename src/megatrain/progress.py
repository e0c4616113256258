"""Progress of long actions: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatrain.text import size

Advance = Callable[[int], None]
"""Takes the number of bytes done since the last call. Safe to call from any thread."""

Say = Callable[[str], None]
"""Takes a line for the user."""

_LINE_EVERY_S = 10.0


@contextmanager
def byte_progress(title: str, total_bytes: int) -> Iterator[Advance]:
    """Show the progress of an action over `total_bytes`; yield the function that advances it."""
    if sys.stderr.isatty():
        with _bar(title, total_bytes) as advance:
            yield advance
    else:
        with _lines(title, total_bytes) as advance:
            yield advance


@contextmanager
def _bar(title: str, total_bytes: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)


@contextmanager
def _lines(title: str, total_bytes: int) -> Iterator[Advance]:
    done, begin = 0, time.monotonic()
    last = begin

    def advance(num_bytes: int) -> None:
        nonlocal done, last
        done += num_bytes
        now = time.monotonic()
        if now - last >= _LINE_EVERY_S:
            last = now
            rate = size(done / (now - begin))
            share = 100 * done // max(total_bytes, 1)
            print(f"{title}: {share}% ({rate}/s)", file=sys.stderr, flush=True)

    yield advance
