"""`megatrain watch`: a run in the terminal, or its report on the loopback.

Both read the files of the run folder, and are no part of the run: they may start late, end early,
or be on another host that sees the folder.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from megatrain.progress import Say
from megatrain.report.run import Run, read_run
from megatrain.report.serving import HOST, open_server
from megatrain.report.terminal import frame, is_over

LEAST_S, SHARE = 1.0, 10
"""Seconds between two looks: at least, and as a multiple of the time that a look takes."""


def watch_run(folder: Path) -> None:
    """Draw a run until it has ended or Ctrl-C is pressed; without a terminal, once."""
    console = Console()
    run = _read(folder)
    if sys.stdout.isatty():
        whole = Live(console=console, screen=True, auto_refresh=False)
        with suppress(KeyboardInterrupt), whole as live:
            while not is_over(run):
                began = time.monotonic()
                run = _read(folder)
                live.update(_drawn(run, console), refresh=True)
                time.sleep(max(LEAST_S, SHARE * (time.monotonic() - began)))
    console.print(_drawn(run, console))


def _read(folder: Path) -> Run:
    return read_run(folder, folder.absolute().name)


def _drawn(run: Run, console: Console) -> Group:
    rows = console.height - 1 if console.is_terminal else 40
    return Group(*frame(run, console.width, rows, time.time()))


def serve_run(folder: Path, port: int, say: Say) -> None:
    """Serve the report of a run until Ctrl-C is pressed."""
    with open_server(folder, port) as server:
        say(f"report of {folder} at http://{HOST}:{server.server_address[1]}/ ; Ctrl-C ends")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
