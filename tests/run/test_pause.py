"""Ctrl-C in a program: the step ends, train() goes on, and the bits are those of one run."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from megatrain.run.callbacks import Callback
from megatrain.run.interrupts import Pause
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of, lines_of, run, state_of, unequal

pytestmark = pytest.mark.usefixtures("cache_in_world")
SETTING = Setting(save_every=None, eval_every=None)
SHORT = {"train": {"steps": 4}, "eval": {"samples": 0}}


class _CtrlC(Callback):
    def on_step_begin(self, config: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            signal.raise_signal(signal.SIGINT)


def test_an_interrupted_run_continues_to_the_same_bits(world: Path, tmp_path: Path) -> None:
    expected = run(config_of(world, tmp_path / "plain", SETTING, **SHORT))
    config = config_of(world, tmp_path / "paused", SETTING, **SHORT)
    with Trainer(config, callbacks=[_CtrlC()]) as trainer:
        with pytest.raises(KeyboardInterrupt, match="stopped after step 2"):
            trainer.train()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert trainer.train().num_steps == 4
        assert unequal(expected, state_of(trainer)) == []


class _CtrlCBefore(Callback):
    def __init__(self) -> None:
        self.num_evaluations = 0

    def on_evaluate(self, config: Any, state: Any, control: Any, **_: Any) -> None:
        self.num_evaluations += 1
        if self.num_evaluations == 1:
            signal.raise_signal(signal.SIGINT)


def test_an_evaluation_before_the_first_step_is_made_once(world: Path, tmp_path: Path) -> None:
    config = config_of(world, tmp_path / "run", SETTING, train={"steps": 3})
    with Trainer(config, callbacks=[_CtrlCBefore()]) as trainer:
        with pytest.raises(KeyboardInterrupt, match="stopped after step 0"):
            trainer.train()
        assert trainer.train().num_steps == 3
    judged = [line["step"] for line in lines_of(tmp_path / "run") if "eval_loss" in line]
    assert judged == [line["step"] for line in lines_of(tmp_path / "run", "samples.jsonl")]
    assert judged == [0, 3]


def test_a_second_one_is_raised_at_once() -> None:
    with Pause(listens=True) as pause:
        signal.raise_signal(signal.SIGINT)
        assert pause.is_asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_program_that_handles_ctrl_c_itself_keeps_it() -> None:
    received = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        with Pause(listens=True) as pause:
            signal.raise_signal(signal.SIGINT)
        assert (received, pause.is_asked) == ([signal.SIGINT], False)
    finally:
        signal.signal(signal.SIGINT, before)
    with Pause(listens=False), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
