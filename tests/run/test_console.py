"""What a step's line says."""

from __future__ import annotations

import io
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


def test_a_step_against_its_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _shown(capsys, STEP | {"of_roofline": 0.912, "roofline": "compute"})
    assert shown == (
        "step 120/2000  loss 2.3141  norm 0.87  lr 9.8e-06  4.02 s  8,131 tok/s  "
        "91% of roofline (compute)\n"
    )


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _on_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, *, every: int = 1, say: str = ""
) -> list[str]:
    """Return the lines that a terminal is sent, without what only moves its cursor."""
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with Live(2000) as live:
        for step in range(1997, 2001):
            live.step(STEP | {"step": step}, stays=step % every == 0)
            live._progress.refresh()
        live.say(say)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue()).splitlines()


@pytest.mark.parametrize(("every", "kept"), [(1, 4), (2, 2)])
def test_on_a_terminal_every_logged_line_stays(
    every: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = _on_terminal(monkeypatch, 200, every=every)
    stay = [line for line in lines if re.match(r"\r?step \d+/2000  loss 2\.3141", line)]
    assert len(set(stay)) == kept, lines
    live = [line for line in lines if re.match(r"\r?step 1997/2000 .*\u2501", line)]
    assert live, lines
    assert all(("loss" in line) == (every > 1) for line in live), "what does not stay is shown"


def test_a_narrow_terminal_cuts_neither_step_nor_loss_nor_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = _on_terminal(monkeypatch, 40, say="plan      " + "a word " * 9)
    assert [
        line for line in lines if re.fullmatch(r"\r?step \d+/2000  loss 2\.3141  eta \d+s", line)
    ]
    assert [line for line in lines if re.match(r"\r?step 1999/2000 +eta \d+s", line)]
    assert [line for line in lines if re.fullmatch(r" {10}\w.*", line)], "beside its label"
    assert max(map(len, lines)) <= 41, "with a carriage return"
    wide = _on_terminal(monkeypatch, 200)
    assert [line for line in wide if re.search("loss .*norm .*tok/s  eta", line)]
