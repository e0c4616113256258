"""`megatrain watch`: a run in the terminal, or its report on the loopback.

Both read the files of the run folder, and are no part of the run: they may start late, end early,
or be on another host that sees the folder.

Laws (tests/cli/test_watching.py)
    1. A run whose heartbeat changes is alive, and one whose heartbeat does not is silent, however
       far the clocks of two hosts are apart.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from megatrain.progress import Say
from megatrain.report.run import Run, number, read_run
from megatrain.report.serving import HOST, open_server
from megatrain.report.terminal import frame, is_over

LEAST_S, SHARE = 1.0, 10
"""Seconds between two looks: at least, and as a multiple of the time that a look takes."""


class RunClock:
    """The time of day by the clock of the run, as far as it is known.

    One heartbeat may be old, so there is only our own clock; the next one tells the run's.
    """

    def __init__(self) -> None:
        self._beat: float | None = None
        self._seen_s = 0.0
        self._is_known = False

    def now(self, run: Run) -> float:
        """Return the time; call it whenever the run was read."""
        beat = number(run.beat.get("time"))
        if beat != self._beat:
            self._is_known = self._beat is not None
            self._beat, self._seen_s = beat, time.monotonic()
        by_beats = (beat or 0.0) + time.monotonic() - self._seen_s
        return by_beats if self._is_known else max(by_beats, time.time())


def watch_run(folder: Path) -> None:
    """Draw a run until it has ended or Ctrl-C is pressed; without a terminal, once."""
    console, clock = Console(), RunClock()
    run = _read(folder)
    if sys.stdout.isatty():
        whole = Live(console=console, screen=True, auto_refresh=False)
        with suppress(KeyboardInterrupt), whole as live:
            while not is_over(run):
                began = time.monotonic()
                run = _read(folder)
                live.update(_drawn(run, console, clock), refresh=True)
                time.sleep(max(LEAST_S, SHARE * (time.monotonic() - began)))
    console.print(_drawn(run, console, clock))


def _read(folder: Path) -> Run:
    return read_run(folder, folder.absolute().name)


def _drawn(run: Run, console: Console, clock: RunClock) -> Group:
    rows = console.height - 1 if console.is_terminal else 40
    return Group(*frame(run, console.width, rows, clock.now(run)))


def serve_run(folder: Path, port: int, say: Say) -> None:
    """Serve the report of a run until Ctrl-C is pressed."""
    with open_server(folder, port) as server:
        say(f"report of {folder} at http://{HOST}:{server.server_address[1]}/ ; Ctrl-C ends")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
