"""Rows of the embedding ahead of its update: same bits, and forward waits for no table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.devices.accelerator import Accelerator
from megatrain.engine import updates
from megatrain.engine.updates import Updates
from megatrain.errors import ConfigError, ScheduleError
from megatrain.step.hazards import Hazards
from megatrain.step.ops import OpKind
from megatrain.step.schedule import build_flush, build_step
from megatrain.step.shape import StepShape
from proofs.races import Run, play, reference, simulator_of, world_of
from testkit.simulated.accelerator import Simulator
from testkit.worlds import Case, World

STEPS = (((1, 4), (2, 5)), ((2, 6),), ((1, 6),))
CASE = Case(sort="", steps=STEPS, update="late")
RUN = Run(
    family="llama", dtype="bf16", case=CASE, policy="late", seed=0, gather_embedding=True,
    rows_ahead=True,
)  # fmt: skip
CLIPS = {"never": 1e3, "always": 1e-3}


def faults(run: Run, max_grad_norm: float | None = None) -> list[str]:
    simulator, world = simulator_of(run), world_of(run.family, run.dtype)
    own = World.optimizer
    with pytest.MonkeyPatch.context() as patched:
        if max_grad_norm is not None:
            patched.setattr(World, "optimizer", lambda self: own(self, max_grad_norm=max_grad_norm))
        expected, found = reference(run), play(run, simulator)
    assert world.store.kinds
    return [*found.differences(expected), *simulator.races, *map(repr, simulator.failures)]


@pytest.mark.parametrize("clips", CLIPS)
def test_bits_are_those_of_an_update_of_the_table_first(clips: str) -> None:
    assert faults(RUN, CLIPS[clips]) == []


@pytest.mark.merge
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("policy", ["late", "random", "early"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_so_they_are_in_other_families_with_evaluations_between(
    family: str, policy: Any, dtype: str
) -> None:
    case = replace(CASE, evaluates_after=(1,), tape="host")
    assert faults(replace(RUN, family=family, dtype=dtype, policy=policy, case=case)) == []


def test_after_a_step_that_is_not_finite_rows_are_as_they_were() -> None:
    def spoil(self: Updates, step: int) -> None:
        if step == 2:
            self._squared_norms[1] = float("inf")
        judge(self, step)

    judge = Updates.judge
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Updates, "judge", spoil)
        assert faults(RUN) == []


def test_rows_without_their_update_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def only_gather(self: Updates, op: Any, rows: Any, gradient: Any) -> int:
        rows.gather()
        return 0

    monkeypatch.setattr(Updates, "rows_ahead", only_gather)
    assert faults(RUN) != []


def test_masters_of_other_rows_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = updates._copied_rows

    def shifted(table: Tensor, *, ids: Tensor, like: Tensor) -> Tensor:
        return own(table, ids=torch.roll(ids, 1), like=like)

    monkeypatch.setattr(updates, "_copied_rows", shifted)
    assert faults(RUN) != []


def test_rows_come_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "_ROWS", 3)
    assert faults(RUN) == []


# The schedule.

SHAPE = StepShape(num_blocks=6, num_micro=2, update="late", gather_embedding=True, rows_ahead=True)


def test_forward_waits_for_the_rows_and_not_for_the_table() -> None:
    ops = build_step(SHAPE, pending=True)
    names = list(map(str, ops))
    assert names[:2] == ["ROWS(0)", "UPDATE(1)"]
    assert [op.block for op in ops if op.kind is OpKind.UPDATE] == [1, 2, 3, 4, 5, 0]
    fetch = next(op for op in ops if op.kind is OpKind.FETCH and op.block == 0)
    assert ("weights", 0) not in fetch.reads
    hazards = Hazards()
    waits = [hazards.feed(op)[1] for op in ops][ops.index(fetch)]
    assert [str(ticket.op) for ticket in waits] == ["ROWS(0)"]
    first = next(op for op in build_step(SHAPE) if op.kind is OpKind.FETCH and op.block == 0)
    assert first.reads == (("weights", 0),)
    assert [str(op) for op in build_flush(SHAPE)][-1] == "UPDATE(0)"


@pytest.mark.parametrize(
    "other",
    [
        {"gather_embedding": False},
        {"update": "in_backward"},
        {"tier": "states"},
        {"trained": (False, True, True, True)},
    ],
)
def test_shapes_that_cannot_have_them_are_refused(other: dict[str, Any]) -> None:
    given = {"num_blocks": 4, "update": "late", "gather_embedding": True, **other}
    with pytest.raises(ScheduleError, match="rows ahead"):
        StepShape(**given, rows_ahead=True)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"gather_embedding": False}, "needs gather_embedding, late updates"),
        ({"state": "8bit"}, "elements of several rows may share a scale"),
    ],
)
def test_an_engine_refuses_what_it_cannot_do(settings: dict[str, Any], text: str) -> None:
    world = world_of("llama", "bf16")
    given = {"gather_embedding": True, "rows_ahead": True, **settings}
    with pytest.raises(ConfigError, match=text):
        world.engine(CASE, device=Accelerator(Simulator()), **given)
