"""What a step's line says."""

from __future__ import annotations

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
