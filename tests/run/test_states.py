"""Every state of the optimizer resumes exactly, and a run may change from one to another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import Interrupted
from megatrain.optim.states import STATES
from megatrain.planning.plan import Plan, make_plan
from megatrain.run.opening import planned
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
def test_auto_keeps_the_state_of_the_checkpoint(world: Path, tmp_path: Path) -> None:
    """Although fp32 would fit: the bits continue."""
    ended = run(config_of(world, tmp_path / "whole", Setting(state="bf16", save_every=2)))
    assert ended is not None
    _saved(world, tmp_path / "run", "bf16")
    config = config_of(world, tmp_path / "run", Setting(state="auto", save_every=2))
    whole = (ended, tmp_path / "whole")
    assert differences(world, run(config, resume=True), tmp_path / "run", whole) == []


@pytest.mark.merge
@pytest.mark.parametrize(("saved", "wanted"), [("fp32", "8bit"), ("bf16", "fp32")])
def test_another_state_is_converted_to_and_reported(
    world: Path, tmp_path: Path, saved: str, wanted: str
) -> None:
    _saved(world, tmp_path / "run", saved)
    said = _converted(world, tmp_path / "run", Setting(state=wanted))
    assert said == [f"converted the optimizer's states from {saved} to {wanted}"]
    with Trainer(
        config_of(world, tmp_path / "run", Setting(state="auto")), dry_run=True
    ) as trainer:
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


def test_a_state_that_no_longer_fits_is_converted_to_the_one_that_does(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(world, tmp_path / "run", "fp32")
    real = make_plan

    def small(machine: Any, workload: Any, settings: Any, pins: Any) -> Plan:
        """A machine without room for fp32, whose plan takes bf16 unless it may not."""
        if "state" in pins and settings.state == "fp32":
            return replace(real(machine, workload, settings, pins), fits=False)
        return real(machine, workload, settings.changed(state="bf16"), {**pins, "state": "fits"})

    monkeypatch.setattr(planned, "make_plan", small)
    said = _converted(world, tmp_path / "run", Setting(state="auto"))
    assert said == [
        "converted the optimizer's states from fp32 to bf16: fp32 no longer fits this machine"
    ]
