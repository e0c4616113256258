"""A run that takes rounds with peers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatrain.batch import MicroBatch
from megatrain.config import Config
from megatrain.engine.engine import Engine
from megatrain.errors import DeviceFull, Interrupted
from testkit.runs import Setting, config_of, run, unequal

pytestmark = pytest.mark.usefixtures("cache_in_world")
SETTING = Setting(save_every=2, eval_every=None)


def _config(world: Path, folder: Path, name: str = "a", **changes: Any) -> Config:
    peers = {
        "at": f"file://{folder}/meeting",
        "name": name,
        "signed": False,
        "inner_steps": 1,
        "outer_rate": 1.0,
        "momentum": 0.0,
        "compression": "none",
        **changes,
    }
    return config_of(world, folder / name, SETTING, peers=peers)


@pytest.mark.merge
def test_a_run_of_one_peer_has_the_bits_of_a_run_without(world: Path, tmp_path: Path) -> None:
    plain = run(config_of(world, tmp_path / "plain", SETTING))
    assert unequal(run(_config(world, tmp_path)), plain) == []
    again = _config(world, tmp_path / "again")
    with pytest.raises(Interrupted, match="stopped after step 5"):
        run(again, stop=5)
    assert unequal(run(again, resume=True), plain) == []
    other = run(_config(world, tmp_path / "other", outer_rate=0.7))
    assert unequal(other, plain) != []


@pytest.mark.merge
def test_a_peer_with_a_full_device_goes_on_in_smaller_micro_batches(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its differences are evaluated, and its claims say where its data is, as without that."""

    def config(name: str, micro: int | str) -> Config:
        given = _config(world, tmp_path / name, score=True, inner_steps=3)
        train = given.train.model_copy(update={"micro_batch_tokens": micro})
        return given.model_copy(update={"train": train})

    expected = run(config("given", 96))
    step = Engine.step

    def limited(engine: Engine, batch: Sequence[MicroBatch], *says: Any) -> Any:
        if max(micro.input_ids.numel() for micro in batch) > 96:
            raise DeviceFull("device memory: no room")
        return step(engine, batch, *says)

    monkeypatch.setattr(Engine, "step", limited)
    assert unequal(run(config("retried", "auto")), expected) == []
    assert "smaller micro-batches" in (tmp_path / "retried/a/events.jsonl").read_text()
    assert _positions(tmp_path / "retried") == _positions(tmp_path / "given")


def _positions(folder: Path) -> list[Any]:
    """Return the position of the data that each claim of a meeting names, in order."""
    paths = sorted(path for path in (folder / "meeting" / "claims").rglob("*") if path.is_file())
    found = [json.loads(path.read_text())["data"] for path in paths]
    assert found
    return found
