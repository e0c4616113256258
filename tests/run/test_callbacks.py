"""Callbacks: events in order, requests that happen, errors that end a run; and no other effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.integrations as integrations
import transformers.trainer_callback
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from transformers.trainer_callback import DefaultFlowCallback

from megatrain.disk.checkpoint.retention import step_of
from megatrain.errors import ConfigError
from megatrain.run.callbacks import HOOKS, INSTEAD, Callback, TrainerControl, require_callback
from megatrain.run.trainer import Trainer
from testkit.runs import (
    NUM_STEPS,
    Setting,
    config_of,
    judge_by,
    lines_of,
    run,
    state_of,
    unequal,
)

pytestmark = pytest.mark.usefixtures("cache_in_world")
SETTING = Setting(save_every=None, eval_every=None, dtype="fp32")
SHORT = {"train": {"steps": 4}, "log": {"every": 2}, "eval": {"samples": 0}}


class Listener(Callback):
    """Notes every event, and asks for what it is told to at the end of steps."""

    def __init__(self, **asks: int) -> None:
        self.heard: list[str] = []
        self.details: dict[str, list[Any]] = {}
        self._asks = asks
        for event in HOOKS:
            setattr(self, event, lambda *a, event=event, **k: self._hear(event, *a, **k))

    def _hear(
        self, event: str, config: Any, state: Any, control: TrainerControl, **more: Any
    ) -> None:
        torch.rand(3)  # draws of a callback are its own
        self.heard.append(f"{event} {state.global_step}".removeprefix("on_"))
        trainer = more.pop("trainer")
        assert (trainer.config, trainer.num_steps) == (config, state.max_steps)
        self.details.setdefault(event, []).extend(more.values())
        for name, step in self._asks.items():
            if event == "on_step_end" and step == state.global_step:
                setattr(control, name, True)


@pytest.mark.merge
def test_events_come_in_order_and_change_no_bit(world: Path, tmp_path: Path) -> None:
    expected = run(config_of(world, tmp_path / "plain", SETTING, **SHORT))
    listener = Listener()
    config = config_of(world, tmp_path / "heard", SETTING, **SHORT)
    with Trainer(config, callbacks=[listener]) as trainer:
        outcome = trainer.train()
        assert unequal(expected, state_of(trainer)) == []
    assert listener.heard == [
        "init_end 0", "train_begin 0", "evaluate 0", "epoch_begin 0",
        "step_begin 0", "step_end 1", "step_begin 1", "step_end 2", "log 2",
        "step_begin 2", "step_end 3", "step_begin 3", "step_end 4", "log 4", "evaluate 4",
        "save 4", "train_end 4",
    ]  # fmt: skip
    lines = [
        json.loads(line) for line in (tmp_path / "heard/metrics.jsonl").read_text().splitlines()
    ]
    assert listener.details["on_log"] == [line for line in lines if line["step"] in (2, 4)][:2]
    assert listener.details["on_evaluate"][-1] == lines[-1]
    assert lines[-1]["eval_loss"] == outcome.eval_loss
    (checkpoint,) = listener.details["on_save"]
    assert checkpoint.parent == tmp_path / "heard/checkpoints"


def test_what_a_callback_asks_for_happens_and_the_run_can_go_on(
    world: Path, tmp_path: Path
) -> None:
    expected = run(config_of(world, tmp_path / "plain", SETTING, **SHORT))
    listener = Listener(should_save=1, should_evaluate=2, should_training_stop=3)
    config = config_of(world, tmp_path / "asked", SETTING, **SHORT)
    with Trainer(config, callbacks=[listener]) as trainer:
        assert trainer.train().num_steps == 3
        assert {"evaluate 2", "train_end 3"} <= set(listener.heard)
        steps = [step_of(checkpoint) for checkpoint in listener.details["on_save"]]
        assert steps == [1, 3]
        assert trainer.checkpoints.saved_step == 3
        assert trainer.train().num_steps == 4
        assert unequal(expected, state_of(trainer)) == []


def test_an_error_in_a_callback_ends_the_run(world: Path, tmp_path: Path) -> None:
    class Fails(Callback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise ZeroDivisionError("mine")

    config = config_of(world, tmp_path, SETTING, **SHORT)
    with pytest.raises(ZeroDivisionError, match="mine"), Trainer(config, callbacks=[Fails()]) as t:
        t.train()
    assert (tmp_path / "metrics.jsonl").read_text().count('"step": 1,') == 1


class _OfTransformers(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, *_: Any, **__: Any) -> None: ...


class _OtherEvent(Callback):
    def on_batch_end(self) -> None: ...


class _OtherOfTransformers(TrainerCallback):  # type: ignore[misc]
    def on_substep_end(self, *_: Any, **__: Any) -> None: ...


def test_callbacks_of_transformers_are_welcome_as_far_as_their_events_are_ours() -> None:
    require_callback(_OfTransformers())
    for callback, message in (
        (_OtherOfTransformers(), "has on_substep_end, which no run calls"),
        (_OtherEvent(), "has on_batch_end, which no run calls"),
        (Callback, r"Callback is a class. Give an object: Callback\(\)"),
        (print, "has no event"),
    ):
        with pytest.raises(ConfigError, match=message):
            require_callback(callback)


def test_what_transformers_ships_is_refused_with_the_setting_that_does_the_same() -> None:
    for callback, way_out in (
        (EarlyStoppingCallback(2), "eval.patience stops a run"),
        (PrinterCallback(), "every log.every steps"),
        (DefaultFlowCallback(), "as an mt.Callback"),
    ):
        with pytest.raises(ConfigError, match=f"reads its TrainingArguments.*{way_out}"):
            require_callback(callback)
    assert all(
        hasattr(transformers.trainer_callback, name) or name in dir(integrations)
        for name in INSTEAD
    )


class _EndOnce(Callback):
    """Ends a run after a step, and lets it go on the next time."""

    def on_step_end(self, config: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 5


@pytest.mark.merge
def test_a_run_that_gave_its_best_model_goes_on_from_its_last(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from the best one, which an export leaves in memory, with the counts of the last."""
    ended = {}
    for name, exports in (("plain", False), ("exports", True)):
        judge_by(monkeypatch, [5.0, 1.0, 2.0, 3.0, 4.0, 5.0])
        setting = Setting(save_every=4, eval_every=2, best=True, dropout=0.1)
        with Trainer(config_of(world, tmp_path / name, setting), callbacks=[_EndOnce()]) as trainer:
            assert trainer.train().num_steps == 5
            if exports:
                assert "model of step 2, the best" in trainer.save_model(tmp_path / "first")
            assert trainer.train().num_steps == NUM_STEPS
            ended[name] = state_of(trainer)
            assert "model of step 2, the best" in trainer.save_model(tmp_path / f"of {name}")
    assert unequal(ended["exports"], ended["plain"]) == []
    assert lines_of(tmp_path / "exports") == lines_of(tmp_path / "plain")
