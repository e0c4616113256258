"""Every state of the optimizer resumes exactly, and a run may change from one to another."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config import load_config
from megatrain.errors import Interrupted
from megatrain.optim.states import STATES
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of, differences, lines_of, run

pytestmark = pytest.mark.usefixtures("cache_in_world")
NARROW = [state for state in STATES["adamw"] if state != "fp32"]


@pytest.mark.merge
@pytest.mark.parametrize("state", NARROW)
def test_a_run_in_a_narrow_state_resumes_in_its_bits(
    world: Path, tmp_path: Path, state: str
) -> None:
    setting = Setting(state=state, save_every=3, keep=1)
    ended = run(config_of(world, tmp_path / "whole", setting))
    assert ended is not None
    config = config_of(world, tmp_path / "stopped", setting)
    with pytest.raises(Interrupted):
        run(config, stop=2)
    assert run(config, resume=True, die=7) is None
    resumed = run(config, resume=True)
    whole = (ended, tmp_path / "whole")
    assert differences(world, resumed, tmp_path / "stopped", whole) == []


def _saved(world: Path, path: Path, state: str) -> None:
    """Train with this state until step 4, and die."""
    assert run(config_of(world, path, Setting(state=state, save_every=2)), die=5) is None


def _converted(world: Path, path: Path, setting: Setting) -> list[str]:
    """Resume, and return what was converted."""
    assert run(config_of(world, path, setting), resume=True) is not None
    (event,) = [e for e in lines_of(path, "events.jsonl") if e["event"] == "resumed"]
    return list(event.get("converted", []))


@pytest.mark.merge
def test_a_config_that_names_no_state_keeps_that_of_the_checkpoint(
    world: Path, tmp_path: Path
) -> None:
    """Although fp32 is the default: the bits continue."""
    ended = run(config_of(world, tmp_path / "whole", Setting(state="bf16", save_every=2)))
    assert ended is not None
    _saved(world, tmp_path / "run", "bf16")
    config = config_of(world, tmp_path / "run", Setting(state=None, save_every=2))
    whole = (ended, tmp_path / "whole")
    assert differences(world, run(config, resume=True), tmp_path / "run", whole) == []
    (event,) = [e for e in lines_of(tmp_path / "run", "events.jsonl") if e["event"] == "resumed"]
    assert not event.get("changed")
    again = load_config(tmp_path / "run" / "config.yaml")
    assert again.optim.state == "bf16", "the next one continues from what is recorded"


@pytest.mark.merge
@pytest.mark.parametrize(("saved", "wanted"), [("fp32", "8bit"), ("bf16", "fp32")])
def test_another_state_is_converted_to_and_reported(
    world: Path, tmp_path: Path, saved: str, wanted: str
) -> None:
    _saved(world, tmp_path / "run", saved)
    said = _converted(world, tmp_path / "run", Setting(state=wanted))
    assert said == [f"converted the optimizer's states from {saved} to {wanted}"]
    with Trainer(config_of(world, tmp_path / "run", Setting(state=None)), dry_run=True) as trainer:
        assert trainer.plan.settings.state == wanted, "which the last checkpoint has"


@pytest.mark.merge
def test_a_conversion_can_be_resumed_and_is_the_same_each_time(world: Path, tmp_path: Path) -> None:
    ends = []
    for name in ("first", "second"):
        _saved(world, tmp_path / name, "fp32")
        config = config_of(world, tmp_path / name, Setting(state="bf16", save_every=3))
        if name == "second":
            assert run(config, resume=True, die=8) is None
        ended = run(config, resume=True)
        assert ended is not None
        ends.append((ended, tmp_path / name))
    assert differences(world, ends[1][0], ends[1][1], ends[0]) == []
