"""Runs with Muon: they resume in their bits, change their state, and keep their optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.errors import CheckpointMismatch, Interrupted
from megatrain.optim.states import STATES
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of, differences, run

pytestmark = pytest.mark.usefixtures("cache_in_world")


@pytest.mark.merge
@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("state", STATES["muon"])
def test_a_run_resumes_in_its_bits(world: Path, tmp_path: Path, state: str, clips: bool) -> None:
    setting = Setting(optimizer="muon", state=state, clips=clips, save_every=3, keep=1)
    ended = run(config_of(world, tmp_path / "whole", setting))
    assert ended is not None
    config = config_of(world, tmp_path / "stopped", setting)
    with pytest.raises(Interrupted):
        run(config, stop=2)
    assert run(config, resume=True, die=7) is None
    resumed = run(config, resume=True)
    assert differences(world, resumed, tmp_path / "stopped", (ended, tmp_path / "whole")) == []


@pytest.mark.merge
def test_another_momentum_would_be_noticed(world: Path, tmp_path: Path) -> None:
    setting = Setting(optimizer="muon")
    ended = run(config_of(world, tmp_path / "whole", setting))
    assert ended is not None
    config = config_of(world, tmp_path / "other", setting)
    other = config.model_copy(update={"optim": config.optim.model_copy(update={"momentum": 0.9})})
    assert differences(world, run(other), tmp_path / "other", (ended, tmp_path / "whole"))


def test_a_run_keeps_its_optimizer(world: Path, tmp_path: Path) -> None:
    assert run(config_of(world, tmp_path, Setting(save_every=2)), die=3) is None
    config = config_of(world, tmp_path, Setting(optimizer="muon"))
    with pytest.raises(CheckpointMismatch, match=r"optim\.name"):
        Trainer(config, dry_run=True)
