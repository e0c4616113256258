"""A run on several ranks: one folder, one log, and no rank goes another way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import CheckpointMismatch, ConfigError, Interrupted, RunFolderError
from megatrain.ranks.ranks import Ranks
from megatrain.run.folder import FOLDER
from megatrain.run.interrupts import Interrupts
from megatrain.run.trainer import Trainer
from testkit.rank_runs import run_on_ranks
from testkit.rank_threads import Together
from testkit.runs import NUM_STEPS, Setting, config_of, lines_of, poison_at, run

SETTING = Setting(save_every=3, eval_every=5)
pytestmark = pytest.mark.usefixtures("cache_in_world")


def weights(folder: Path) -> dict[str, bytes]:
    """Return every tensor file of a run's newest checkpoint."""
    newest = finished(folder / FOLDER)[0]
    files = sorted(newest.rglob("*.safetensors"))
    return {str(path.relative_to(newest)): path.read_bytes() for path in files}


def train(trainer: Trainer) -> int:
    return trainer.train().num_steps


class AskedAt(Interrupts):
    """One rank is asked to end during a step."""

    trainer: Trainer

    def __init__(self, ranks: Ranks, rank: int, step: int) -> None:
        super().__init__()
        self._asked, self._step = ranks.owner.rank == rank, step

    @property
    def reason(self) -> str | None:
        found = getattr(self, "trainer", None)
        at = found is not None and found.state.global_step + 1 >= self._step
        return "SIGTERM" if self._asked and at else None

    @reason.setter
    def reason(self, value: str | None) -> None:
        pass


def stopped(rank: int, step: int) -> tuple[Callable[[Trainer], str], Callable[[Ranks], AskedAt]]:
    """Return what trains until one rank is asked to end, and who asks it."""

    def use(trainer: Trainer) -> str:
        interrupts = trainer.interrupts
        assert isinstance(interrupts, AskedAt)
        interrupts.trainer = trainer
        with pytest.raises(Interrupted) as ended:
            trainer.train()
        return f"{trainer.state.global_step} {ended.value}"

    return use, lambda ranks: AskedAt(ranks, rank, step)


@pytest.fixture(scope="module")
def whole(world: Path, cache_in_world: None) -> Path:
    """A run of two ranks that nothing disturbed."""
    config = config_of(world, world / "whole", SETTING)
    assert run_on_ranks(2, config, train) == [NUM_STEPS, NUM_STEPS]
    return world / "whole"


@pytest.mark.merge
def test_one_folder_has_each_line_once(whole: Path) -> None:
    steps = [line["step"] for line in lines_of(whole) if "loss" in line]
    assert steps == list(range(1, NUM_STEPS + 1))
    events = lines_of(whole, "events.jsonl")
    assert [line["step"] for line in events if line["event"] == "saved"] == [3, 6, 9]
    assert not list(whole.glob(".seen*"))
    assert json.loads((whole / "plan.json").read_text())["settings"]["device"] == "cpu"


@pytest.mark.merge
def test_one_rank_that_is_asked_ends_all_and_the_run_resumes_to_its_bits(
    world: Path, tmp_path: Path, whole: Path
) -> None:
    config = config_of(world, tmp_path / "run", SETTING)
    use, interrupts = stopped(rank=1, step=4)
    first, second = run_on_ranks(2, config, use, interrupts=interrupts)
    assert first == second
    assert first.startswith("4 rank 1: SIGTERM: stopped after step 4 of 9, saved after step 4;")
    shutil.copytree(tmp_path / "run", tmp_path / "alone", symlinks=True)
    assert run_on_ranks(2, config, train, resume=True) == [NUM_STEPS, NUM_STEPS]
    assert weights(tmp_path / "run") == weights(whole)
    assert lines_of(tmp_path / "run") == lines_of(whole)
    # One process goes on from there too, to sums in another order.
    other = config_of(world, tmp_path / "alone", SETTING)
    assert run(other, resume=True) is not None
    assert [line["step"] for line in lines_of(tmp_path / "alone") if "loss" in line][-1] == 9
    assert weights(tmp_path / "alone").keys() == weights(whole).keys()


@pytest.mark.merge
def test_ranks_take_up_what_one_process_saved(world: Path, tmp_path: Path) -> None:
    config = config_of(world, tmp_path / "run", SETTING)
    assert run(config, die=4) is None
    assert run_on_ranks(2, config, train, resume=True) == [NUM_STEPS, NUM_STEPS]
    events = lines_of(tmp_path / "run", "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "resumed"] == [3]


@pytest.mark.merge
def test_a_resume_with_other_data_would_be_noticed(
    world: Path, tmp_path: Path, whole: Path
) -> None:
    config = config_of(world, tmp_path / "run", SETTING)
    use, interrupts = stopped(rank=0, step=4)
    run_on_ranks(2, config, use, interrupts=interrupts)
    other = config_of(world, tmp_path / "run", SETTING, optim={"learning_rate": 2e-2})
    run_on_ranks(2, other, train, resume=True)
    assert weights(tmp_path / "run") != weights(whole)
    fixed = config_of(world, tmp_path / "run", SETTING, data={"seed": 1})
    with pytest.raises(CheckpointMismatch, match=r"data\.seed"):
        run_on_ranks(2, fixed, train, resume=True)


@pytest.mark.merge
def test_all_ranks_return_to_a_checkpoint(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_at(monkeypatch, 5, float("nan"))
    config = config_of(world, tmp_path / "run", SETTING, train={"on_nonfinite": "rollback"})
    assert run_on_ranks(2, config, train) == [NUM_STEPS, NUM_STEPS]
    back = [e for e in lines_of(tmp_path / "run", "events.jsonl") if e["event"] == "rolled back"]
    assert [(event["step"], event["to"]) for event in back] == [(5, 3)]


@pytest.mark.merge
def test_rank_0_is_asked_for_a_save_and_chooses_the_best_model_for_all(
    world: Path, tmp_path: Path
) -> None:
    config = config_of(world, tmp_path / "run", SETTING, save={"best": True, "every": None})

    def use(trainer: Trainer) -> str:
        if trainer.folder.is_dry:
            (trainer.folder.path / ".save").touch()
        trainer.train()
        return trainer.save_model(tmp_path / "model")

    first, second = run_on_ranks(2, config, use)
    assert first == second
    assert (tmp_path / "model" / "config.json").exists()
    events = lines_of(tmp_path / "run", "events.jsonl")
    saved = [event["step"] for event in events if event["event"] == "saved"]
    assert saved[0] == 1
    assert saved[-1] == NUM_STEPS


def _given(configs: list[Config]) -> Callable[[Ranks], Any]:
    def work(ranks: Ranks) -> None:
        Trainer(configs[ranks.owner.rank], ranks=ranks).close()

    return work


def test_ranks_with_other_settings_are_refused(world: Path, tmp_path: Path) -> None:
    configs = [
        config_of(world, tmp_path / "run", SETTING, train={"steps": steps}) for steps in (9, 8)
    ]
    with pytest.raises(ConfigError, match=r"train\.steps: 9 on rank 0; 8 on rank 1"):
        Together(2).run(_given(configs))
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_is_refused(world: Path, whole: Path) -> None:
    with pytest.raises(RunFolderError, match="already has a run"):
        run_on_ranks(2, config_of(world, whole, SETTING), train)
