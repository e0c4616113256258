"""Storage that stalls on one rank ends a save, and not the run: ranks are processes, with gloo."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import Interrupted, RankLost
from megatrain.ranks.ranks import Ranks
from megatrain.ranks.torch_ranks import Channel
from megatrain.run import checkpoints, saving
from megatrain.run.folder import FOLDER
from megatrain.run.trainer import Trainer
from testkit.patience import HANG_S
from testkit.rank_processes import Outcome, rank_outcomes
from testkit.rank_runs import run_on_ranks
from testkit.rank_threads import DEADLINE_S as DEADLINE_OF_THREADS_S
from testkit.runs import NUM_STEPS, Setting, config_of, lines_of

DEADLINE_S = 4.0
STALL_S = 3 * DEADLINE_S
FILE = "state/block-00001.safetensors"
"""A file that rank 1 writes."""
SETTING = Setting(save_every=3)
pytestmark = pytest.mark.usefixtures("cache_in_world")


def at_first_fsync(act: Callable[[], None]) -> None:
    """Let something happen when this process makes the file durable for the first time."""
    real, acts = os.fsync, [act]

    def fsync(fd: int) -> None:
        if acts and os.readlink(f"/proc/self/fd/{fd}").endswith(FILE):
            acts.pop()()
        real(fd)

    os.fsync = fsync  # type: ignore[assignment]


def stall() -> None:
    time.sleep(STALL_S)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_storage() -> None:
    """Give no save up, whatever the time that a call takes."""
    checkpoints.STALL_SHARE = 1e6


def wait_for_storage_until_the_deadline() -> None:
    """Wait for other ranks in a save no longer than in a step."""
    wait_for_storage()
    real = Channel.swap

    def swap(self: Channel, *given: Any, **more: Any) -> None:
        real(replace(self, deadline_s=min(self.deadline_s, DEADLINE_S)), *given, **more)

    Channel.swap = swap  # type: ignore[method-assign]


def train(
    ranks: Ranks, config: Config, happens: Callable[[], None] | None, changes: Callable[[], None]
) -> dict[str, Any]:
    """Be one rank of a run; something happens to rank 1."""
    saving.RETRY_S = 0.0
    changes()
    if ranks.owner.rank == 1 and happens is not None:
        at_first_fsync(happens)
    said: list[str] = []
    with Trainer(config, ranks=ranks) as trainer:
        report = trainer.saving.report
        trainer.saving.report = lambda say: report(said.append)  # type: ignore[method-assign]
        num_steps = trainer.train().num_steps
        ranks.agree({})  # none leaves before all are done
    return {"steps": num_steps, "said": said}


def trained(
    world: Path,
    folder: Path,
    happens: Callable[[], None] | None,
    changes: Callable[[], None] = bool,  # type: ignore[assignment]
) -> list[Outcome]:
    config = config_of(world, folder, SETTING, train={"rank_deadline": DEADLINE_S})
    return rank_outcomes(2, train, config, happens, changes, deadline_s=DEADLINE_S)


def weights(folder: Path) -> dict[str, bytes]:
    """Return every tensor file of a run's newest checkpoint, which verifies."""
    newest = finished(folder / FOLDER)[0]
    assert verify(newest).step == NUM_STEPS
    files = sorted(newest.rglob("*.safetensors"))
    return {str(path.relative_to(newest)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def whole(world: Path, cache_in_world: None) -> Path:
    """A run of two ranks that nothing disturbed."""
    outcomes = trained(world, world / "whole", None, wait_for_storage)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    return world / "whole"


def saves(folder: Path) -> list[tuple[str, int]]:
    events = lines_of(folder, "events.jsonl")
    return [(event["event"], event["step"]) for event in events if "save" in event["event"]]


@pytest.mark.merge
def test_a_stall_of_three_deadlines_on_one_rank_costs_a_save_and_not_a_bit(
    world: Path, tmp_path: Path, whole: Path
) -> None:
    outcomes = trained(world, tmp_path / "run", stall)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    assert outcomes[0].result["steps"] == NUM_STEPS
    assert weights(tmp_path / "run") == weights(whole)
    assert lines_of(tmp_path / "run") == lines_of(whole)
    assert saves(tmp_path / "run")[0] == ("save failed", 3)
    assert saves(tmp_path / "run")[-1] == ("saved", NUM_STEPS)
    assert ("saved", 3) not in saves(tmp_path / "run")
    stalled = (
        rf"rank 1: storage has stalled on {socket.gethostname()}: write .*{FILE} has not returned "
    )
    errors = [e.get("error", "") for e in lines_of(tmp_path / "run", "events.jsonl")]
    assert any(re.match(stalled, error) for error in errors)
    assert any(
        re.match(f"step .: NOT saved: {stalled}", text) for text in outcomes[0].result["said"]
    )
    assert all(verify(path) for path in (tmp_path / "run" / FOLDER).iterdir()), "no remains"


@pytest.mark.merge
def test_ranks_wait_for_one_whose_storage_is_slow(world: Path, tmp_path: Path, whole: Path) -> None:
    outcomes = trained(world, tmp_path / "run", stall, wait_for_storage)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    assert saves(tmp_path / "run") == saves(whole)
    assert weights(tmp_path / "run") == weights(whole)


@pytest.mark.merge
def test_with_a_deadline_in_saves_a_rank_of_slow_storage_would_be_lost(
    world: Path, tmp_path: Path
) -> None:
    """The sibling: so the stall is one that ends a run, unless something is done about it."""
    outcomes = trained(world, tmp_path / "run", stall, wait_for_storage_until_the_deadline)
    assert all(outcome.exit_code for outcome in outcomes)
    assert isinstance(outcomes[0].error, RankLost)


def ended(
    world: Path, folder: Path, at_pause: Callable[[Trainer, threading.Event], None]
) -> tuple[list[list[str]], threading.Event]:
    """Train two ranks, as threads, whose last save hangs on rank 1; return what they said.

    `at_pause` is what happens when the run waits.
    """
    let_go = threading.Event()
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(FILE):
            let_go.wait(HANG_S)
        real(fd)

    def use(trainer: Trainer) -> list[str]:
        said: list[str] = []
        trainer.saving.pause = lambda seconds: at_pause(trainer, let_go)
        at_end = trainer.saving.at_end
        trainer.saving.at_end = lambda step, say: at_end(step, said.append)  # type: ignore[method-assign]
        with suppress(Interrupted):
            trainer.train()
        return said

    config = config_of(world, folder, Setting(save_every=None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(checkpoints, "STALL_SHARE", 1.0 / DEADLINE_OF_THREADS_S)
        patch.setattr(saving, "RETRY_S", 0.0)
        return run_on_ranks(2, config, use), let_go


@pytest.mark.merge
def test_the_end_of_a_run_waits_for_storage_and_says_so(world: Path, tmp_path: Path) -> None:
    said, _ = ended(world, tmp_path / "run", lambda trainer, let_go: let_go.set())
    waits = f"the state after step {NUM_STEPS} is in memory only. Waiting until storage answers"
    assert any(text.startswith(waits) for text in said[0])
    assert saves(tmp_path / "run") == [("save failed", NUM_STEPS), ("saved", NUM_STEPS)]
    assert weights(tmp_path / "run")
    assert len(list((tmp_path / "run" / FOLDER).iterdir())) == 1


@pytest.mark.merge
def test_a_call_that_never_returns_does_not_keep_a_run_from_ending(
    world: Path, tmp_path: Path
) -> None:
    def ask_to_end(trainer: Trainer, let_go: threading.Event) -> None:
        trainer.interrupts.reason = "SIGTERM"

    said, let_go = ended(world, tmp_path / "run", ask_to_end)
    assert any("NOT saved: rank 1: storage has stalled" in text for text in said[0])
    assert finished(tmp_path / "run" / FOLDER) == []
    let_go.set()


@pytest.mark.merge
def test_a_rank_that_dies_in_a_file_call_is_lost(world: Path, tmp_path: Path) -> None:
    outcomes = trained(world, tmp_path / "run", die)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert isinstance(outcomes[0].error, RankLost)
    assert "rank 1" in str(outcomes[0].error)
