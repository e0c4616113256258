"""A run prints at most ten lines before its first step; `-v` prints the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.cli.demo import write_demo
from megatrain.config import load_config
from megatrain.run.trainer import Trainer

MOST = 10


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    return write_demo(tmp_path / "demo", num_steps=10)


def _faulty(path: Path) -> list[str]:
    """Return changes for two sources of rows, one with many faults, and for more notes."""
    rows = path.parent / "faulty.jsonl"
    faults = ["broken", "[]", '{"messages": 1}', '{"messages": []}', '{"text": "a"}']
    rows.write_text((path.parent / "rows.jsonl").read_text() + "\n".join(faults) + "\n")
    sources = f"data.train=[{path.parent}/rows.jsonl, {rows}]"
    return [sources, "data.max_bad=0.5", "data.max_dropped=0.5", "eval.patience=3", "log.every=1"]


def test_at_most_ten_lines_precede_the_first_step(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two more are those of a machine's first measurement, which the command prints."""
    with Trainer(load_config(path, _faulty(path))) as trainer:
        trainer.train()
        verbose = trainer.startup_lines(verbose=True)
        plan = json.loads((trainer.folder.path / "plan.json").read_text())
        assert plan["notes"] == trainer.notes
    lines = capsys.readouterr().err.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("step 1/10 "))
    short = lines[:first]
    assert len(short) <= MOST - 2, "\n".join(short)
    assert any(" more lines: plan.json has them, `train -v` prints them" in line for line in short)
    assert any(line.startswith("fits: ") for line in short)
    assert any(line.startswith("data: 2 sources, ") for line in short)
    assert len("\n".join(verbose).splitlines()) > 2 * MOST
    assert any(line.startswith("  bad: ") for line in verbose)
    assert not any(line.startswith("  bad: ") for line in short)
