"""What a step's line says."""

from __future__ import annotations

import io
import math
import re
import sys

import pytest

from megatrain.run.console import Live

STEP: dict[str, object] = {
    "step": 120, "loss": 2.3141, "grad_norm": 0.87, "learning_rate": 9.8e-6, "seconds": 4.02,
    "tokens_per_s": 8131.0, "applied": True,
}  # fmt: skip


def _shown(capsys: pytest.CaptureFixture[str], metrics: dict[str, object]) -> str:
    Live(2000).step(metrics)
    return capsys.readouterr().err


def test_a_step_against_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _shown(capsys, STEP | {"of_bound": 0.912, "bound": "compute"})
    assert shown == (
        "step 120/2000  loss 2.3141  norm 0.87  lr 9.8e-06  4.02 s  8,131 tok/s  "
        "91% of bound (compute)\n"
    )


def test_without_a_measured_machine_there_is_no_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert _shown(capsys, STEP) == (
        "step 120/2000  loss 2.3141  norm 0.87  lr 9.8e-06  4.02 s  8,131 tok/s\n"
    )


def test_what_is_left_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    live = Live(2000)
    live.step(STEP)
    live._began -= 4.0
    live.step(STEP | {"step": 121})
    assert "eta 2h05" in capsys.readouterr().err


def test_a_run_that_goes_back_to_a_checkpoint_begins_to_count_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    live = Live(2000)
    for step in (120, 121, 120, 119, 120):
        live.step(STEP | {"step": step})
    assert [" eta " in line for line in capsys.readouterr().err.splitlines()] == [
        False, True, False, False, True,
    ]  # fmt: skip


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _on_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, kept_every_s: float, *, steps: int = 4
) -> list[str]:
    """Return the lines that a terminal is sent, without what only moves its cursor."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with Live(2000, kept_every_s=kept_every_s) as live:
        for number in range(steps):
            live.step(STEP | {"step": 2000 - steps + 1 + number})
            live._progress.refresh()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()).splitlines()


@pytest.mark.parametrize(("kept_every_s", "kept"), [(0.0, 4), (math.inf, 2)])
def test_on_a_terminal_lines_stay_now_and_then(
    kept_every_s: float, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = _on_terminal(monkeypatch, 200, kept_every_s)
    stay = [line for line in lines if re.match(r"\r?step \d+/2000  loss 2\.3141", line)]
    assert len(set(stay)) == kept, lines
    assert "step 2000/2000  loss 2.3141" in stay[-1], "the last step always stays"


def test_a_narrow_terminal_shows_step_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _on_terminal(monkeypatch, 40, math.inf)
    live = [line for line in lines if re.match(r"\r?step \d{4}/2000 +eta \d+s +loss", line)]
    assert live, lines
    assert max(map(len, lines)) <= 40


def test_a_wide_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("\u2501" in line for line in _on_terminal(monkeypatch, 200, math.inf))
    assert not any("\u2501" in line for line in _on_terminal(monkeypatch, 80, math.inf))
