"""The machine chooses how fast, the config chooses what is computed.

One config is planned for cards of 12 to 141 GB in hosts of 64 to 1,500 GB, and run with each plan.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.machine.reserve import left_by_system, with_reserve
from megatrain.planning.plan import Plan, make_plan
from megatrain.run.opening import planned
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of, lines_of

pytestmark = pytest.mark.usefixtures("cache_in_world")
GIB = 1 << 30
MACHINES = [("3060", 64), ("4090", 128), ("H100 SXM", 1024), ("H200", 1500)]
SETTING = Setting(state=None, eval_every=None, save_every=None)
AUTO = {"steps": 3, "batch_tokens": "auto", "micro_batch_tokens": "auto"}


def _run(
    world: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, card: str, ram: int, **changes: Any
) -> tuple[Plan, list[float]]:
    """Train three steps on the CPU as the plan for a machine says; return it and the losses."""
    profile = find_machine(card)[0].profile(ram_bytes=left_by_system(ram * GIB))
    plans: list[Plan] = []

    def for_that_machine(_machine: Any, workload: Any, settings: Any, pins: Any) -> Plan:
        plan = make_plan(with_reserve(profile), workload, settings, pins)
        plans.append(plan)
        return plan

    monkeypatch.setattr(planned, "make_plan", for_that_machine)
    train, optim = AUTO | changes.get("train", {}), {"learning_rate": "auto"}
    config = config_of(world, folder, SETTING, train=train, optim=optim | changes.get("optim", {}))
    with Trainer(config) as trainer:
        trainer.train()
        assert trainer.plan.profile.name == profile.name
    losses = [line["loss"] for line in lines_of(folder, "metrics.jsonl") if "loss" in line]
    return plans[-1], losses


def _computed(plan: Plan) -> tuple[Any, ...]:
    """Return what of a plan decides what is computed."""
    return plan.workload.step_tokens, plan.settings.state, plan.workload.max_grad_norm


@pytest.mark.merge
def test_one_config_computes_the_same_on_every_machine(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [_run(world, tmp_path / str(ram), monkeypatch, card, ram) for card, ram in MACHINES]
    plans, losses = zip(*found, strict=True)
    assert len({plan.profile.name for plan in plans}) == len(MACHINES)
    assert len({_computed(plan) for plan in plans}) == 1
    rates = [line["lr"] for line in lines_of(tmp_path / "64", "metrics.jsonl") if "lr" in line]
    for _, ram in MACHINES:
        lines = lines_of(tmp_path / str(ram), "metrics.jsonl")
        assert [line["lr"] for line in lines if "lr" in line] == rates
    assert len(losses[0]) == AUTO["steps"]
    assert all(each == losses[0] for each in losses)


@pytest.mark.merge
@pytest.mark.parametrize(
    "changes",
    [{"optim": {"state": "8bit"}}, {"train": {"batch_tokens": 128}}],
    ids=["states", "step"],
)
def test_states_and_steps_that_differ_are_noticed(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    plan, losses = _run(world, tmp_path / "as", monkeypatch, "4090", 128)
    other, others = _run(world, tmp_path / "changed", monkeypatch, "4090", 128, **changes)
    assert _computed(plan) != _computed(other)
    assert losses != others
