"""Laws of retry_smaller.py: a step that does not fit costs micro-batches, not the run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from megatrain.batch import MicroBatch
from megatrain.cli.demo import write_demo
from megatrain.config import Config, load_config
from megatrain.engine.engine import Engine
from megatrain.engine.updates import Updates
from megatrain.errors import Interrupted, OutOfDeviceMemory
from megatrain.memory.kinds import TensorKind
from megatrain.planning.plan import Plan
from megatrain.run.opening import opening
from megatrain.run.opening.planned import plan_run
from megatrain.run.opening.retry_smaller import SNAPSHOT, can_shrink
from megatrain.run.trainer import Trainer
from testkit import runs
from testkit.patience import eventually
from testkit.runs import NUM_STEPS, Setting, write_model, write_world

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
            raise OutOfDeviceMemory("device memory: no room", {"segments": []})
        return step(engine, batch, *says)

    monkeypatch.setattr(Engine, "step", limited)


def trained(config: Config) -> tuple[int, torch.Tensor]:
    """Return the tokens of a micro-batch in the end, and the weights."""
    with Trainer(config) as trainer:
        trainer.train()
        trainer.engine.synchronize()
        assert trainer.state.global_step == 2
        arena = trainer.home.store.arena(TensorKind.HI).clone()
        return trainer.plan.settings.micro_batch_tokens, arena


def events(config: Config) -> list[dict[str, Any]]:
    path = Path(config.run_dir) / "events.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
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
            raise OutOfDeviceMemory("device memory: no room")
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
        pytest.raises(OutOfDeviceMemory, match=r"^device memory: no room$"),
        Trainer(config) as trainer,
    ):
        trainer.train()
    assert bool(events(config) if not changes else []) is not bool(changes)
    assert (Path(config.run_dir) / SNAPSHOT).exists()
    assert not can_shrink(trainer._opened, "step 1", OutOfDeviceMemory("full"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    return folder


def fill_up(
    patch: pytest.MonkeyPatch, *, at_step: int, in_backward: bool = False, most_tokens: int = 96
) -> None:
    """Let the device be full in the first layer, from a step on, if micro-batches are larger.

    Forward meets it while the updates of later blocks are still to come; backward, once the
    update of a later block has begun.
    """
    engines: list[Engine] = []
    begin, forward = Engine.step, LlamaDecoderLayer.forward

    def step(engine: Engine, *given: Any) -> Any:
        engines[:] = [engine]
        return begin(engine, *given)

    def full(layer: Any, hidden: torch.Tensor, *given: Any, **named: Any) -> Any:
        here = layer.self_attn.layer_idx == 0
        larger = hidden.shape[0] * hidden.shape[1] > most_tokens and layer.training
        late = bool(engines) and engines[0]._num_steps >= at_step
        if here and larger and late and torch.is_grad_enabled() == in_backward:
            if in_backward:
                assert eventually(lambda: engines[0]._machine.updates.half_applied)
            raise torch.OutOfMemoryError("out of memory")
        return forward(layer, hidden, *given, **named)

    patch.setattr(Engine, "step", step)
    patch.setattr(LlamaDecoderLayer, "forward", full)


def config_at(world: Path, run: Path, setting: Setting, micro: int | str = "auto") -> Config:
    return runs.config_of(world, run, setting, train={"micro_batch_tokens": micro})


@pytest.mark.merge
def test_a_step_in_the_middle_is_done_again_and_the_rest_is_that_of_a_resumed_run(
    world: Path, tmp_path: Path
) -> None:
    setting = Setting(save_every=2)
    stopped = tmp_path / "stopped"
    with pytest.raises(Interrupted):
        runs.run(config_at(world, stopped, setting), stop=4)
    expected = runs.run(config_at(world, stopped, setting, 96), resume=True)
    config = config_at(world, tmp_path / "retried", setting)
    with pytest.MonkeyPatch.context() as patch:
        fill_up(patch, at_step=5)
        found = runs.run(config)
    assert runs.unequal(found, expected) == []
    (record,) = events(config)
    assert (record["step"], record["from"], record["to"]) == (4, 192, 96)
    lines = runs.lines_of(Path(config.run_dir))
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, NUM_STEPS + 1)]
    assert runs.unequal(found, runs.run(config_at(world, tmp_path / "whole", setting))) != []


@pytest.mark.merge
def test_a_resumed_run_keeps_the_smaller_micro_batches_and_may_shrink_itself(
    world: Path, tmp_path: Path
) -> None:
    setting = Setting(save_every=2)
    config = config_at(world, tmp_path / "retried", setting)
    with pytest.MonkeyPatch.context() as patch:
        fill_up(patch, at_step=3)
        whole = runs.run(config)
    died = config_at(world, tmp_path / "died", setting)
    with pytest.MonkeyPatch.context() as patch:
        fill_up(patch, at_step=3)
        for stop in (2, 4):
            with pytest.raises(Interrupted):
                runs.run(died, resume=stop > 2, stop=stop)
    resumed = runs.run(died, resume=True)
    assert runs.unequal(resumed, whole) == []
    assert [record["to"] for record in events(died)] == [96]


@pytest.mark.merge
def test_updates_that_the_lanes_left_are_finished_or_the_step_is_not_done_again(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sibling: without them the store has blocks of two steps, and that is noticed."""
    monkeypatch.setattr(Engine, "_finish_updates", lambda engine: None)
    fill_up(monkeypatch, at_step=5)
    monkeypatch.setattr(Updates, "apply", slowly(Updates.apply))
    config = config_at(world, tmp_path / "run", Setting())
    with pytest.raises(
        OutOfDeviceMemory, match=r"No second try of step 5 .*\(updates were under way"
    ):
        runs.run(config)
    assert not events(config)


@pytest.mark.merge
def test_samples_that_do_not_fit_cost_no_run_either(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted = Engine._predicted

    def limited(engine: Engine, *given: Any) -> Any:
        if engine._machine.settings.micro_batch_tokens > 96:
            raise OutOfDeviceMemory("device memory: no room")
        return predicted(engine, *given)

    expected = runs.run(config_at(world, tmp_path / "given", Setting(), 96))
    monkeypatch.setattr(Engine, "_predicted", limited)
    config = config_at(world, tmp_path / "retried", Setting())
    assert runs.unequal(runs.run(config), expected) == []
    (record,) = events(config)
    assert (record["step"], record["from"], record["to"]) == (0, 192, 96)
    for name in ("metrics.jsonl", "samples.jsonl"):
        of_given = runs.lines_of(tmp_path / "given", name)
        assert [x["step"] for x in runs.lines_of(Path(config.run_dir), name)] == [
            x["step"] for x in of_given
        ]


@pytest.mark.merge
def test_steps_keep_the_scores_of_a_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    write_world(tmp_path)
    write_model(tmp_path / "teacher", 0.0, seed=1, hidden_size=48)

    def config(name: str, micro: int | str) -> Config:
        loss = {"name": "distill", "teacher": str(tmp_path / "teacher"), "top_k": 8}
        train = {"micro_batch_tokens": micro}
        setting = Setting(packing=False, dtype="fp32")
        return runs.config_of(tmp_path, tmp_path / name, setting, loss=loss, train=train)

    retried = config("retried", "auto")
    with monkeypatch.context() as patch:
        limit(patch, 96)
        found = runs.run(retried)
    assert [record["to"] for record in events(retried)] == [96]
    assert runs.unequal(found, runs.run(config("given", 96))) == []


def slowly(apply: Callable[..., int]) -> Callable[..., int]:
    def slow(*given: Any) -> int:
        time.sleep(0.05)
        return apply(*given)

    return slow


@pytest.mark.merge
def test_a_step_that_has_changed_blocks_is_not_done_again(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_up(monkeypatch, at_step=3, in_backward=True)
    config = config_at(world, tmp_path / "run", Setting(clips=False))
    with pytest.raises(OutOfDeviceMemory, match=r"No second try of step 3 .*max_grad_norm is null"):
        runs.run(config)
    assert not events(config)
