"""Laws of retry_smaller.py: a first step that does not fit costs micro-batches, not the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.batch import MicroBatch
from megatrain.cli.demo import write_demo
from megatrain.config import Config, load_config
from megatrain.engine.engine import Engine
from megatrain.errors import DeviceFull
from megatrain.memory.kinds import Kind
from megatrain.planning.plan import Plan
from megatrain.run.folder import RunFolder
from megatrain.run.opening import opening
from megatrain.run.opening.planned import plan_run
from megatrain.run.opening.retry_smaller import SNAPSHOT, can_shrink, keep_snapshot
from megatrain.run.trainer import Trainer

ROWS = 64
"""Tokens of the longest row."""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    return write_demo(tmp_path / "demo", num_steps=2)


def config_of(path: Path, name: str, *changes: str) -> Config:
    run = f"save.dir={path.parent / name}"
    usual = ["data.packing=false", f"data.max_length={ROWS}", "train.batch_tokens=1024"]
    return load_config(path, [*usual, "train.micro_batch_tokens=auto", run, *changes])


def limit(monkeypatch: pytest.MonkeyPatch, most_tokens: int) -> None:
    """Let a step fail whose micro-batches are larger."""
    step = Engine.step

    def limited(engine: Engine, batch: Sequence[MicroBatch], *says: Any) -> Any:
        if max(micro.input_ids.numel() for micro in batch) > most_tokens:
            raise DeviceFull("device memory: no room", {"segments": []})
        return step(engine, batch, *says)

    monkeypatch.setattr(Engine, "step", limited)


def trained(config: Config) -> tuple[int, torch.Tensor]:
    """Return the tokens of a micro-batch in the end, and the weights."""
    with Trainer(config) as trainer:
        trainer.train()
        trainer.engine.settle()
        assert trainer.state.step == 2
        arena = trainer.home.store.arena(Kind.HI).clone()
        return trainer.plan.settings.micro_batch_tokens, arena


def events(config: Config) -> list[dict[str, Any]]:
    lines = (Path(config.run_dir) / "events.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    told = ("smaller micro-batches", "activations given up")
    return [record for record in found if record["event"] in told]


@pytest.mark.merge
def test_a_run_goes_on_with_half_the_micro_batch_and_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned, _ = trained(config_of(path, "whole"))
    assert planned > 2 * ROWS
    half = config_of(path, "half", f"train.micro_batch_tokens={planned // 4}")
    _, expected = trained(half)
    limit(monkeypatch, planned // 4)
    config = config_of(path, "retried")
    capsys.readouterr()
    tokens, weights = trained(config)
    assert tokens == planned // 4
    assert torch.equal(weights, expected), "the bits of a run that was given them"
    said = " ".join(" ".join(capsys.readouterr()).split())
    assert said.count("step 1 does not fit: micro-batches of") == 2
    record = {"event": "smaller micro-batches", "step": 0, "reason": "device memory: no room"}
    assert events(config) == [
        record | {"from": planned, "to": planned // 2},
        record | {"from": planned // 2, "to": planned // 4},
    ]
    plan = json.loads((Path(config.run_dir) / "plan.json").read_text())
    assert plan["settings"]["micro_batch_tokens"] == planned // 4
    lines = (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "loss" in json.loads(line)]
    assert steps == [1, 2], "each step once"


@pytest.mark.merge
def test_kept_activations_are_given_up_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of this machine keeps none; here it does, and memory lasts without them."""
    step = Engine.step
    config = config_of(path, "given-up", "memory.kept_layers=auto")

    def keeping(*args: Any, **kwargs: Any) -> Plan:
        return plan_run(*args, **kwargs).with_setting("kept_layers", 2, "")

    def limited(engine: Engine, batch: Sequence[MicroBatch], *says: Any) -> Any:
        if engine._machine.settings.kept_layers:
            raise DeviceFull("device memory: no room")
        return step(engine, batch, *says)

    _, expected = trained(config_of(path, "none", "memory.kept_layers=0"))
    monkeypatch.setattr(opening, "plan_run", keeping)
    monkeypatch.setattr(Engine, "step", limited)
    _, weights = trained(config)
    assert torch.equal(weights, expected)
    (record,) = [found for found in events(config) if found["event"] == "activations given up"]
    assert (record["from"], record["to"]) == (2, 0)


@pytest.mark.merge
@pytest.mark.parametrize("changes", [("train.micro_batch_tokens=256",), ()])
def test_what_the_config_gives_or_cannot_be_halved_stays_and_the_run_ends(
    path: Path, monkeypatch: pytest.MonkeyPatch, changes: tuple[str, ...]
) -> None:
    """With what device memory held in the run folder."""
    limit(monkeypatch, 0)
    config = config_of(path, "ends", *changes)
    with (
        pytest.raises(DeviceFull, match=r"^device memory: no room$"),
        Trainer(config) as trainer,
    ):
        trainer.train()
    assert bool(events(config) if not changes else []) is not bool(changes)
    assert (Path(config.run_dir) / SNAPSHOT).exists()
    assert not can_shrink(trainer._opened)


def test_a_step_after_the_first_is_not_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def second_fails(engine: Engine, batch: Sequence[MicroBatch], *says: Any) -> Any:
        if engine._num_steps == 1:
            raise DeviceFull("device memory: no room")
        return step(engine, batch, *says)

    monkeypatch.setattr(Engine, "step", second_fails)
    config = config_of(path, "later")
    with pytest.raises(DeviceFull), Trainer(config) as trainer:
        trainer.train()
    assert not (Path(config.run_dir) / SNAPSHOT).exists()  # nothing was told
    assert trainer.state.step == 1


def test_what_the_device_tells_is_kept_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    with RunFolder(tmp_path / "run") as folder:
        keep_snapshot(folder, DeviceFull("full"), said.append)
        assert said == []
        assert not (folder.path / SNAPSHOT).exists()
        keep_snapshot(folder, DeviceFull("full", {"segments": [{"total_size": 7}]}), said.append)
        kept = json.loads((folder.path / SNAPSHOT).read_text())
    assert kept == {"segments": [{"total_size": 7}]}
    (line,) = said
    assert SNAPSHOT in line
