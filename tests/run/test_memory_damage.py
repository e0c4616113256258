"""A bit that flips in memory during a run: the run ends in the bits that it should, or with an
error, and no checkpoint has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import MemoryDamaged
from megatrain.memory.kinds import Kind
from megatrain.optim.states import M
from megatrain.run.folder import FOLDER
from megatrain.run.trainer import Trainer
from testkit.rank_runs import run_on_ranks
from testkit.runs import Setting, State, config_of, differences, lines_of, run, state_of

pytestmark = pytest.mark.usefixtures("cache_in_world")
LAST = 9
"""Steps of these runs."""


def checking(world: Path, path: Path, **setting: Any) -> Config:
    given = {"save_every": 3, "keep": 2, "eval_every": None} | setting
    return config_of(world, path, Setting(**given), memory={"check": "on"})


@pytest.fixture(scope="module")
def whole(world: Path, cache_in_world: None) -> tuple[State, Path]:
    """A run that nothing disturbed."""
    ended = run(checking(world, world / "checked"))
    assert ended is not None
    return ended, world / "checked"


def flip_after(trainer: Trainer, step: int, kind: Kind, *, here: bool = True) -> None:
    """Flip a bit once, when a step has ended and before what is due is saved."""
    if_due, done = trainer.saving.if_due, list[int]()

    def flipping(now: int, say: Callable[[str], None], **asked: bool) -> None:
        if now == step and not done:
            done.append(now)
            trainer.engine.settle()
            if here:
                arena = trainer.home.store.arena(kind)
                arena[len(arena) // 2] ^= 1 << 6
        if_due(now, say, **asked)

    trainer.saving.if_due = flipping  # type: ignore[method-assign, assignment]


def ended_after_flip(config: Config, step: int, kind: Kind) -> State:
    with Trainer(config) as trainer:
        flip_after(trainer, step, kind)
        trainer.train()
        return state_of(trainer)


def returns(path: Path) -> list[int]:
    events = lines_of(path, "events.jsonl")
    return [event["to"] for event in events if event["event"] == "memory damaged"]


@pytest.mark.merge
@pytest.mark.parametrize(
    ("step", "kind", "to"),
    [(4, Kind.HI, 3), (5, M, 3), (6, Kind.LO, 3), (LAST, M, 6)],
    ids=["weights", "moments", "masters, with a save under way", "moments, at the end"],
)
def test_a_run_goes_back_to_the_bits_of_an_undisturbed_one(
    step: int, kind: Kind, to: int, world: Path, tmp_path: Path, whole: tuple[State, Path]
) -> None:
    ended = ended_after_flip(checking(world, tmp_path / "run"), step, kind)
    assert returns(tmp_path / "run") == [to]
    assert differences(world, ended, tmp_path / "run", whole) == []


@pytest.mark.merge
def test_without_a_checkpoint_the_run_ends_with_the_place(world: Path, tmp_path: Path) -> None:
    config = checking(world, tmp_path / "run", save_every=100)
    with pytest.raises(MemoryDamaged, match=r"host memory changed .* --resume"):
        ended_after_flip(config, 2, Kind.HI)
    assert finished(tmp_path / "run" / FOLDER) == []


@pytest.mark.merge
def test_a_damaged_model_is_not_exported(world: Path, tmp_path: Path) -> None:
    with Trainer(checking(world, tmp_path / "run")) as trainer:
        trainer.train()
        trainer.home.store.arena(Kind.HI)[0] ^= 1
        with pytest.raises(MemoryDamaged):
            trainer.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.merge
def test_ranks_go_back_together(world: Path, tmp_path: Path) -> None:
    def use(trainer: Trainer) -> int:
        flip_after(trainer, 4, Kind.LO, here=trainer.folder.is_dry)  # on rank 1
        return trainer.train().num_steps

    assert run_on_ranks(2, checking(world, tmp_path / "run"), use) == [LAST, LAST]
    assert returns(tmp_path / "run") == [3]
