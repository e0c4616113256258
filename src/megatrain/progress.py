"""Progress of long actions: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatrain.text import figure, size

Advance = Callable[[int], None]
"""Takes the number of bytes or tokens done since the last call. Safe to call from any thread."""

Say = Callable[[str], None]
"""Takes a line for the user."""

_LINE_EVERY_S = 10.0
_ROOM_FOR_RATES = 80
"""Columns of a terminal that has room for bytes and their rate beside the bar."""


@contextmanager
def byte_progress(title: str, total_bytes: int, *, shown: bool = True) -> Iterator[Advance]:
    """Show the progress of an action over `total_bytes`; yield the function that advances it.

    Not `shown`: another rank speaks.
    """
    if not shown:
        yield lambda num_bytes: None
    elif sys.stderr.isatty():
        with _bar(title, total_bytes) as advance:
            yield advance
    else:
        with _lines(title, total_bytes, size, "/s") as advance:
            yield advance


@contextmanager
def token_progress(title: str, total: int, *, shown: bool = True) -> Iterator[Advance]:
    """Show the progress of an action over so many tokens, by a line now and then."""
    if not shown:
        yield lambda number: None
        return
    print(f"{title}: {total:,} tokens", file=sys.stderr, flush=True)
    with _lines(title, total, figure, " tok/s") as advance:
        yield advance


@contextmanager
def _bar(title: str, total_bytes: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    narrow = console.width < _ROOM_FOR_RATES
    columns: tuple[ProgressColumn, ...] = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=8 if narrow else 40),
        *([TaskProgressColumn()] if narrow else [DownloadColumn(binary_units=True)]),
        *([] if narrow else [TransferSpeedColumn()]),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)


@contextmanager
def _lines(
    title: str, total: int, in_words: Callable[[float], str], unit: str
) -> Iterator[Advance]:
    done, begin = 0, time.monotonic()
    last = begin

    def advance(num_done: int) -> None:
        nonlocal done, last
        done += num_done
        now = time.monotonic()
        if now - last >= _LINE_EVERY_S:
            last = now
            rate = in_words(done / (now - begin))
            share = 100 * done // max(total, 1)
            print(f"{title}: {share}% ({rate}{unit})", file=sys.stderr, flush=True)

    yield advance
