"""Runs with a disk tier: the bits of a run without one, and nothing lost when the disk fails."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import finished
from megatrain.errors import DiskError, MegaTrainError, RunFolderError, ScratchFileCorrupted
from megatrain.memory.kinds import TensorKind
from megatrain.memory.tier.filling import TierFilling
from megatrain.memory.tier.scratch_file import Tier
from megatrain.run.folder import FOLDER
from megatrain.run.trainer import Trainer
from testkit.faulty_os import CHANGES, READS, faulty
from testkit.runs import (
    Setting,
    State,
    config_of,
    differences,
    poison_at,
    run,
    state_of,
)
from testkit.tiers import forced_tier

pytestmark = pytest.mark.usefixtures("cache_in_world")

ENOSPC, EIO = 28, 5
NUM_STEPS = 4


def _config(world: Path, path: Path, tier: str = "none", **setting: Any) -> Config:
    kind = Setting(tier=tier, save_every=2, eval_every=None, **setting)
    return config_of(world, path, kind, train={"steps": NUM_STEPS})


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[State, Path]:
    """The run without a tier."""
    path = tmp_path_factory.mktemp("whole") / "run"
    state = run(_config(world, path))
    assert state is not None
    return state, path


def _left(world: Path) -> list[str]:
    return [path.name for path in world.glob(".megatrain-scratch*")]


def test_a_run_with_a_tier_has_the_bits_of_one_without(
    world: Path, tmp_path: Path, whole: tuple[State, Path]
) -> None:
    with forced_tier("states"), Trainer(_config(world, tmp_path / "run", "states")) as trainer:
        assert trainer.home.store.on_disk
        assert any("written once a step" in note for note in trainer.notes)
        trainer.train()
        ended = state_of(trainer)
    assert differences(world, ended, tmp_path / "run", whole) == []
    assert _left(world) == []


@pytest.mark.merge
def test_moments_in_8_bits_have_the_same_bits_on_disk(world: Path, tmp_path: Path) -> None:
    ends: dict[str, State | None] = {}
    for tier in ("none", "states"):
        config = _config(world, tmp_path / tier, tier, state="8bit", clips=False)
        with forced_tier(tier):
            ends[tier] = run(config)
    expected = ends["none"]
    assert expected is not None
    assert {kind.name for _, kind in expected} >= {"m", "m_scale", "v", "v_scale"}
    found = differences(world, ends["states"], tmp_path / "states", (expected, tmp_path / "none"))
    assert found == []


def test_a_run_that_fits_without_a_tier_makes_no_file(world: Path, tmp_path: Path) -> None:
    config = _config(world, tmp_path / "run", "states")
    assert config.memory.disk == str(world)
    with Trainer(config, dry_run=True) as trainer:
        assert trainer.home.store.tier is None
        assert not any("disk tier" in note for note in trainer.notes)


def test_a_tier_in_memory_is_reported(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.run.opening.banner.is_in_memory", lambda folder: True)
    config = _config(world, tmp_path / "run", "states")
    with forced_tier("states"), Trainer(config, dry_run=True) as trainer:
        assert any("memory itself" in note for note in trainer.notes)


@pytest.mark.few(1)
@pytest.mark.parametrize("tiers", [("states", "none"), ("none", "states"), ("states", "states")])
def test_a_resume_with_or_without_a_tier_is_exact(
    world: Path, tmp_path: Path, whole: tuple[State, Path], tiers: tuple[str, str]
) -> None:
    for number, tier in enumerate(tiers):
        config = _config(world, tmp_path / "run", tier)
        with forced_tier(tier):
            ended = run(config, resume=number > 0, die=None if number else 3)
    assert differences(world, ended, tmp_path / "run", whole) == []


@pytest.mark.merge
@pytest.mark.parametrize("on_nonfinite", ["rollback", "skip"])
def test_a_step_that_is_left_out_leaves_the_same_bits(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_nonfinite: str
) -> None:
    poison_at(monkeypatch, 3, float("nan"))
    ends: list[State | None] = []
    for tier in ("none", "states"):
        config = _config(world, tmp_path / tier, tier)
        train = config.train.model_copy(update={"on_nonfinite": on_nonfinite})
        with forced_tier(tier):
            ends.append(run(config.model_copy(update={"train": train})))
    assert ends[0] is not None
    assert differences(world, ends[1], tmp_path / "states", (ends[0], tmp_path / "none")) == []


def test_a_resume_that_leaves_the_tier_empty_would_be_noticed(
    world: Path, tmp_path: Path, whole: tuple[State, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TierFilling, "put", lambda *_: None)
    with forced_tier("states"):
        run(_config(world, tmp_path / "run", "states"), die=3)
        ended = run(_config(world, tmp_path / "run", "states"), resume=True)
    assert any(
        text.startswith("lo of ") for text in differences(world, ended, tmp_path / "run", whole)
    )


def _fails_then_resumes(
    world: Path, path: Path, whole: tuple[State, Path], **faults: Any
) -> MegaTrainError | None:
    """Run under a fault, then resume until the end; return the error of the first run."""
    config, error, ended = _config(world, path, "states"), None, None
    with forced_tier("states"):
        try:
            with faulty(**faults), Trainer(config) as trainer:
                trainer.train()
                ended = state_of(trainer)
        except MegaTrainError as failure:
            error = failure
            for checkpoint in finished(path / FOLDER):
                verify(checkpoint)
            ended = run(config, resume=True)
    assert differences(world, ended, path, whole) == []
    assert verify(finished(path / FOLDER)[0]).step == NUM_STEPS
    assert _left(world) == []
    return error


@pytest.fixture(scope="module")
def num_calls(world: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many file calls a run with a tier makes."""
    path = tmp_path_factory.mktemp("count") / "run"
    with faulty(counted=CHANGES | READS) as calls, forced_tier("states"):
        run(_config(world, path, "states"))
    return calls.num_calls


@pytest.mark.few(1)
@pytest.mark.parametrize("number", range(6))
def test_one_failing_call_loses_nothing(
    world: Path, tmp_path: Path, whole: tuple[State, Path], num_calls: int, number: int
) -> None:
    faults: dict[str, Any] = {"counted": CHANGES | READS, "error": (ENOSPC, EIO)[number % 2]}
    fail_at = random.Random(number).randrange(num_calls)
    found = _fails_then_resumes(world, tmp_path / "run", whole, fail_at=fail_at, **faults)
    assert found is None or isinstance(found, DiskError | RunFolderError)


@pytest.mark.long
@pytest.mark.parametrize("error", [ENOSPC, EIO])
def test_any_one_failing_call_loses_nothing(
    world: Path, tmp_path: Path, whole: tuple[State, Path], num_calls: int, error: int
) -> None:
    faults: dict[str, Any] = {"counted": CHANGES | READS, "error": error}
    for fail_at in range(num_calls):
        path = tmp_path / str(fail_at)
        found = _fails_then_resumes(world, path, whole, fail_at=fail_at, **faults)
        assert found is None or isinstance(found, DiskError | RunFolderError)


def test_a_changed_byte_ends_the_run_and_a_resume_is_exact(
    world: Path, tmp_path: Path, whole: tuple[State, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = Tier.put, 0

    def put(tier: Tier, block: int, kind: TensorKind, chunk: int, buffer: Any) -> None:
        nonlocal count
        real(tier, block, kind, chunk, buffer)
        count += block == 1
        if count == 9:  # in the third step
            spoilt = buffer.clone()
            spoilt[5] ^= 4
            os.pwrite(tier._fd, spoilt.numpy().data, tier._offset(block, kind, chunk))

    config = _config(world, tmp_path / "run", "states")
    with forced_tier("states"):
        with monkeypatch.context() as patch:
            patch.setattr(Tier, "put", put)
            patch.setattr("megatrain.files._O_DIRECT", 0)  # a copy need not be aligned
            with pytest.raises(ScratchFileCorrupted, match=r"block 1.*--resume") as caught:
                run(config)
        assert caught.value.exit_code == 5
        assert verify(finished(tmp_path / "run" / FOLDER)[0]).step == 2
        ended = run(config, resume=True)
    assert differences(world, ended, tmp_path / "run", whole) == []
