"""Storage that stalls on one rank ends a save, and not the run: ranks are processes, with gloo."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import RankLost
from megatrain.ranks.ranks import Ranks
from megatrain.ranks.torch_ranks import GlooCarrier
from megatrain.run import checkpoints, saving
from megatrain.run.checkpoints import FOLDER
from megatrain.run.together.joined import together
from megatrain.run.trainer import Trainer
from testkit.rank_processes import Outcome, rank_outcomes
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

    os.fsync = fsync


def stall() -> None:
    time.sleep(STALL_S)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_storage() -> None:
    """Give no save up, whatever the time that a call takes."""
    checkpoints.STALL_SHARE = 1e6


def know_nothing_of_storage() -> None:
    """Neither give a save up, nor tell the others why this rank does not answer."""
    wait_for_storage()
    GlooCarrier.storing = lambda self, call: None  # type: ignore[method-assign]


def train(
    ranks: Ranks, config: Config, happens: Callable[[], None] | None, changes: Callable[[], None]
) -> dict[str, Any]:
    """Be one rank of a run; something happens to rank 1."""
    saving.RETRY_S = 0.0
    changes()
    if ranks.owner.rank == 1 and happens is not None:
        at_first_fsync(happens)
    said: list[str] = []
    with together(ranks), Trainer(config, ranks=ranks) as trainer:
        report = trainer.saving.report
        trainer.saving.report = lambda say: report(  # type: ignore[method-assign]
            lambda text: (said.append(text), say(text))[1]
        )
        return {"steps": trainer.train().num_steps, "said": said}


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
    outcomes = trained(world, world / "whole", None)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    return world / "whole"


def saves(folder: Path) -> list[tuple[str, int]]:
    events = lines_of(folder, "events.jsonl")
    return [(event["event"], event["step"]) for event in events if "save" in event["event"]]


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
    failed = next(e for e in lines_of(tmp_path / "run", "events.jsonl") if "error" in e)
    assert re.fullmatch(
        rf"rank 1: storage has stalled on {socket.gethostname()}: write .*{FILE} has not returned "
        "within 1 s",
        failed["error"],
    )
    assert f"step 3: NOT saved: {failed['error']}" in outcomes[0].result["said"]
    assert all(verify(path) for path in (tmp_path / "run" / FOLDER).iterdir()), "no remains"


def test_ranks_wait_for_one_whose_storage_is_slow(world: Path, tmp_path: Path, whole: Path) -> None:
    """It says that it is inside a file call: that does not count for the deadline."""
    outcomes = trained(world, tmp_path / "run", stall, wait_for_storage)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    assert saves(tmp_path / "run") == saves(whole)
    assert weights(tmp_path / "run") == weights(whole)


def test_a_rank_that_says_nothing_of_its_storage_is_lost(world: Path, tmp_path: Path) -> None:
    """The sibling: so the stall is one that ends a run, unless something is done about it."""
    outcomes = trained(world, tmp_path / "run", stall, know_nothing_of_storage)
    assert all(outcome.exit_code for outcome in outcomes)
    assert isinstance(outcomes[0].error, RankLost)


def test_a_rank_that_dies_in_a_file_call_is_lost(world: Path, tmp_path: Path) -> None:
    outcomes = trained(world, tmp_path / "run", die)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert isinstance(outcomes[0].error, RankLost)
    assert "rank 1" in str(outcomes[0].error)
