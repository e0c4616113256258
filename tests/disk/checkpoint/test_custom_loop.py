"""Laws of custom_loop.py."""

from __future__ import annotations

from pathlib import Path

import pytest

import megatrain as mt
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import CheckpointCorrupted, CheckpointMismatch
from testkit.families import save_tiny
from testkit.plain import make_batch

NUM_STEPS = 4


class Killed(Exception):
    """Ends a loop where a signal might."""


def loop(model: Path, folder: Path, *, killed_at: int | None = None, save_every: int = 1) -> int:
    """Train as a script would; return the step that it began with."""
    home = mt.load_model(model, dtype="bf16")
    optimizer = mt.AdamW(learning_rate=1e-2)
    with mt.Engine(home.decoder, home.store, optimizer=optimizer) as engine:
        notes = mt.load_checkpoint(folder, home, engine) or {"step": 0}
        for step in range(notes["step"], NUM_STEPS):
            engine.step(make_batch([(2, 8)], seed=step))
            if step == killed_at:
                raise Killed
            if (step + 1) % save_every == 0:
                mt.save_checkpoint(folder, home, engine, {"step": step + 1})
    return int(notes["step"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "llama")
    return folder


def newest_hashes(folder: Path) -> object:
    return read_manifest(finished(folder)[0]).files


def test_a_loop_that_was_killed_ends_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    assert loop(model, tmp_path / "whole") == 0
    with pytest.raises(Killed):
        loop(model, tmp_path / "killed", killed_at=2)
    (tmp_path / "killed" / "step-00000003-0123abcd").mkdir()  # a save that never ended
    assert loop(model, tmp_path / "killed") == 2
    assert newest_hashes(tmp_path / "killed") == newest_hashes(tmp_path / "whole")
    assert len(list((tmp_path / "killed").iterdir())) == 2


def test_a_step_that_is_lost_would_be_noticed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop(model, tmp_path / "whole")
    with pytest.raises(Killed):
        loop(model, tmp_path / "killed", killed_at=2)
    monkeypatch.setattr(mt.Engine, "restore", lambda self, step, updates: None)
    loop(model, tmp_path / "killed")
    assert newest_hashes(tmp_path / "killed") != newest_hashes(tmp_path / "whole")


def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(model: Path, tmp_path: Path) -> None:
    loop(model, tmp_path / "run")
    for number, path in enumerate(finished(tmp_path / "run")):
        file = next((path / "state").iterdir())
        file.write_bytes(bytes(len(file.read_bytes())))
        if number == 0:
            assert loop(model, tmp_path / "run", save_every=9) == NUM_STEPS - 1
    with pytest.raises(CheckpointCorrupted, match="step-0000000"):
        loop(model, tmp_path / "run")


def test_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    loop(model, tmp_path / "run")
    save_tiny(tmp_path / "other", "gpt2")
    with pytest.raises(CheckpointMismatch, match="belongs to another model"):
        loop(tmp_path / "other", tmp_path / "run")
