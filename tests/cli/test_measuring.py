"""The first measurement of a machine: when it happens, how it ends, who makes it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatrain.cli import measuring
from megatrain.cli.measuring import VARIABLE, is_wanted, measure_first
from megatrain.planning.machine.facts import host_facts


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that was never measured, and a file that its doctor makes."""
    made = tmp_path / "measured"
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("CI", raising=False)
    code = f"from pathlib import Path; Path({str(made)!r}).write_text('')"
    monkeypatch.setattr(measuring, "COMMAND", (sys.executable, "-S", "-c", code))
    return made


def test_a_machine_is_measured_once(doctor: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure_first()
    assert doctor.exists()
    doctor.unlink()
    monkeypatch.setattr(measuring, "kept_examination", lambda: pytest)
    measure_first()
    assert not doctor.exists()


def test_its_progress_is_not_printed(
    doctor: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run has ten lines before its first step."""
    code = "import sys; print('measuring copies', file=sys.stderr); print('a page')"
    monkeypatch.setattr(measuring, "COMMAND", (sys.executable, "-S", "-c", code))
    measure_first()
    assert capfd.readouterr().err.startswith("First run on this machine: benchmarking it (about ")
    measure_first()
    assert len(capfd.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("name", [VARIABLE, "CI"])
def test_a_variable_leaves_it_out(doctor: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0" if name == VARIABLE else "true")
    measure_first()
    assert not doctor.exists()


@pytest.mark.parametrize(
    ("code", "limit_s", "said"),
    [
        ("raise SystemExit(3)", 60.0, "the measurement failed (exit code 3)"),
        ("raise ValueError('no memory')", 60.0, "the measurement failed (ValueError: no memory)"),
        ("import time; time.sleep(60)", 0.1, "the measurement was ended after 0 s"),
    ],
)
def test_a_measurement_that_fails_or_hangs_ends_nothing(
    doctor: Path,
    code: str,
    limit_s: float,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(measuring, "COMMAND", (sys.executable, "-S", "-c", code))
    monkeypatch.setattr(measuring, "LIMIT_S", limit_s)
    measure_first()
    assert said in capsys.readouterr().err


def test_a_run_on_the_cpu_beside_a_gpu_has_no_use_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_wanted({}, "cpu") == (not host_facts().gpus)

    class Facts:
        gpus = ("a card",)

    monkeypatch.setattr(measuring, "host_facts", Facts)
    assert not is_wanted({}, "cpu")
    assert is_wanted({}, "auto")
