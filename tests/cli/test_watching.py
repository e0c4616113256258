"""`megatrain watch`: in a terminal until Ctrl-C, and once where there is none."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from megatrain.cli import watching
from megatrain.cli.app import app
from megatrain.report.run import Run
from tests.report.fake_runs import write_run


def test_without_a_terminal_the_state_is_printed_once(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["watch", str(write_run(tmp_path / "mine", num_steps=20))])
    assert found.exit_code == 0
    assert found.output.startswith("mine")
    assert "step 20" in found.output


@pytest.mark.merge
def test_a_terminal_is_drawn_until_ctrl_c_and_given_back(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", num_steps=20)
    before = {path: path.read_bytes() for path in run.iterdir()}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "megatrain", "watch", str(run)],
        stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True,
        env=os.environ | {"COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    text = os.read(ours, 1 << 16)
    while b"loss" not in text:
        text += os.read(ours, 1 << 16)
    assert b"\x1b[?1049h" in text  # the other screen
    process.send_signal(signal.SIGINT)
    while True:
        try:
            text += os.read(ours, 1 << 16)
        except OSError:  # the other side is closed
            break
    os.close(ours)
    assert process.wait() == 0
    ended = text.index(b"\x1b[?1049l")
    assert b"step 20" in text[ended:]  # the last picture stays
    assert b"Traceback" not in text
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_a_page_is_served_until_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Served:
        server_address = ("127.0.0.1", 4321)

        def __enter__(self) -> Served:
            return self

        def __exit__(self, *_: object) -> None:
            said.append("closed")

        def serve_forever(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(watching, "open_server", lambda folder, port: Served())
    watching.serve_run(tmp_path, 0, said.append)
    assert re.search(r"http://127\.0\.0\.1:4321/", said[0])
    assert said[1:] == ["closed"]


@pytest.mark.parametrize("apart_s", [-3e8, -60.0, 0.0, 60.0, 3e8])
def test_clocks_that_are_apart_do_not_make_a_run_silent(
    monkeypatch: pytest.MonkeyPatch, apart_s: float
) -> None:
    host = SimpleNamespace(here_s=0.0, wall_s=1e9)
    own = SimpleNamespace(
        monotonic=lambda: host.here_s, time=lambda: host.wall_s + host.here_s + apart_s
    )
    monkeypatch.setattr(watching, "time", own)
    run, clock = Run(name="mine"), watching.RunClock()

    def silent_s(beaten_at: float) -> float:
        run.beat = {"state": "training", "time": host.wall_s + beaten_at}
        return clock.now(run) - float(run.beat["time"])

    silent_s(0.0)
    host.here_s = 10.0
    assert silent_s(10.0) == 0.0
    host.here_s = 50.0
    assert silent_s(10.0) == 40.0


def test_a_heartbeat_that_stays_is_silence_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = SimpleNamespace(monotonic_s=5.0)
    own = SimpleNamespace(monotonic=lambda: now.monotonic_s, time=lambda: 0.0)
    monkeypatch.setattr(watching, "time", own)
    run, clock = Run(name="mine"), watching.RunClock()
    run.beat = {"state": "training", "time": 1e9}
    assert clock.now(run) == 1e9
    now.monotonic_s = 65.0
    assert clock.now(run) == 1e9 + 60.0
