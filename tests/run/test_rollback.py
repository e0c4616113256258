"""Rollbacks: from poisoned weights a run goes further back, and ends in the bits that it should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config import Config
from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import finished, step_of
from megatrain.errors import NonFiniteStep
from megatrain.memory.kinds import TensorKind
from megatrain.run.folder import FOLDER
from megatrain.run.rollback import MOST_ROLLBACKS
from megatrain.run.trainer import Trainer
from testkit.rank_runs import run_on_ranks
from testkit.runs import Setting, State, config_of, differences, lines_of, poison_at, run, state_of

pytestmark = pytest.mark.usefixtures("cache_in_world")

ROLLING = {"train": {"on_nonfinite": "rollback"}}


def rolling(world: Path, path: Path, **setting: Any) -> Config:
    given = {"save_every": 2, "keep": 2, "eval_every": None} | setting
    return config_of(world, path, Setting(**given), **ROLLING)


@pytest.fixture(scope="module")
def whole(world: Path, cache_in_world: None) -> tuple[State, Path]:
    """A run that nothing disturbed."""
    ended = run(rolling(world, world / "whole"))
    assert ended is not None
    return ended, world / "whole"


def poison_before_the_save_of(trainer: Trainer, chosen: int, *, here: bool = True) -> None:
    """Turn one weight into NaN in memory, once: the save of `chosen` has it, and matching hashes.

    Of ranks, the one that has it `here`; the others wait as long.
    """
    if_due = trainer.saving.if_due
    done: list[int] = []

    def poisoned(step: int, say: Callable[[str], None], **asked: bool) -> None:
        if step == chosen and not done:
            done.append(step)
            trainer.engine.synchronize()
            if here:
                weights = trainer.home.store.arena(TensorKind.HI).view(torch.bfloat16)
                weights[len(weights) // 2] = float("nan")
        if_due(step, say, **asked)

    trainer.saving.if_due = poisoned  # type: ignore[method-assign]


def ended_after_poison(config: Config, step: int) -> State:
    with Trainer(config) as trainer:
        poison_before_the_save_of(trainer, step)
        trainer.train()
        return state_of(trainer)


def returns(path: Path) -> list[tuple[int, int]]:
    events = lines_of(path, "events.jsonl")
    return [(e["step"], e["to"]) for e in events if e["event"] == "rolled back"]


@pytest.mark.merge
def test_a_run_goes_back_beyond_a_poisoned_checkpoint_to_the_bits_of_an_undisturbed_one(
    world: Path, tmp_path: Path, whole: tuple[State, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    ended = ended_after_poison(rolling(world, tmp_path / "run"), 4)
    assert returns(tmp_path / "run") == [(5, 4), (6, 4), (7, 4), (8, 2)]
    assert differences(world, ended, tmp_path / "run", whole) == []
    given_up = [
        e["given_up"] for e in lines_of(tmp_path / "run", "events.jsonl") if "given_up" in e
    ]
    assert [[name[:13] for name in names] for names in given_up] == [["step-00000004"]]
    said = " ".join(capfd.readouterr().err.split())
    assert "back to step 2, to an older checkpoint: training failed 4 times" in said
    assert "The steps after step 4 are trained again" in said


@pytest.mark.merge
def test_ranks_go_back_together(world: Path, tmp_path: Path) -> None:
    def use(trainer: Trainer) -> int:
        poison_before_the_save_of(trainer, 4, here=trainer.folder.is_dry)  # on rank 1
        return trainer.train().num_steps

    assert run_on_ranks(2, rolling(world, tmp_path / "run"), use) == [9, 9]
    assert returns(tmp_path / "run") == [(5, 4), (6, 4), (7, 4), (8, 2)]
    faults = [line for line in lines_of(tmp_path / "run") if "fault" in line]
    assert faults == [], "no step was left out in the end"


@pytest.mark.merge
def test_without_an_older_checkpoint_it_stops_after_a_few_tries_and_deletes_nothing(
    world: Path, tmp_path: Path
) -> None:
    config = rolling(world, tmp_path / "run", save_every=4)
    with pytest.raises(NonFiniteStep, match=r"step 8: .* that was not tried 3 times\."):
        ended_after_poison(config, 4)
    assert returns(tmp_path / "run") == [(5, 4), (6, 4), (7, 4)]
    assert len(returns(tmp_path / "run")) == MOST_ROLLBACKS
    assert [step_of(path) for path in finished(tmp_path / "run" / FOLDER)] == [4]


def test_an_older_checkpoint_that_is_damaged_is_none_to_return_to(
    world: Path, tmp_path: Path
) -> None:
    def damage_the_first(checkpoint: Path) -> None:
        if step_of(checkpoint) == 2:
            path = sorted((checkpoint / "state").glob("*.safetensors"))[0]
            path.write_bytes(path.read_bytes()[:-1] + b"x")

    with Trainer(rolling(world, tmp_path / "run")) as trainer:
        trainer.saving.on_saved = damage_the_first
        poison_before_the_save_of(trainer, 4)
        with pytest.raises(NonFiniteStep, match=r"step 8: .* that was not tried 3 times\."):
            trainer.train()


@pytest.mark.merge
def test_a_run_that_fails_from_every_checkpoint_stops_and_all_are_still_there(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(5, 10):
        poison_at(monkeypatch, step, float("nan"))
    with pytest.raises(NonFiniteStep, match="that was not tried 3 times"):
        run(rolling(world, tmp_path / "run"))
    found = finished(tmp_path / "run" / FOLDER)
    assert {step_of(path) for path in found} == {2, 4}
    for path in found:
        verify(path)
    # From 4 until it is given up; then from 2, with steps 3 and 4 trained again each time.
    assert returns(tmp_path / "run") == [(5, 4), (6, 4), (7, 4), (8, 2), (5, 2), (6, 2)]


@pytest.mark.merge
def test_steps_that_are_bad_themselves_are_left_out_and_weights_are_not_given_up(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 5, 7):
        poison_at(monkeypatch, step, float("nan"))
    run(rolling(world, tmp_path / "run"))
    assert returns(tmp_path / "run") == [(3, 2), (5, 4), (7, 6)]
    lines = [line for line in lines_of(tmp_path / "run") if "fault" in line]
    assert [line["step"] for line in lines] == [3, 5, 7]
    saved = [e for e in lines_of(tmp_path / "run", "events.jsonl") if e["event"] == "saved"]
    assert [event["step"] for event in saved] == [2, 4, 6, 8, 9]
