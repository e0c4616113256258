"""Laws of clipping by a second backward: the bits of late clipping, and no gradient that waits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import AdamW, StepSettings, load_model
from megatrain.engine.updates import Updates
from megatrain.errors import NonFiniteStep, ScheduleError
from megatrain.memory.kinds import TensorKind, bytes_per_param, store_kinds
from megatrain.models.decoder import COMPUTE_DTYPES
from megatrain.optim.states import STATES
from megatrain.step.shape import StepShape
from testkit.engines import make_engine
from testkit.families import COVERING, save_tiny
from testkit.plain import make_batch
from testkit.rank_training import RankCase, ranks_of
from testkit.states import steps_of
from testkit.worlds import SORTS, Case, world_of
from testkit.worlds import make_batch as small_batch

FAMILIES = ("llama", "qwen3", "gemma2", "gpt2", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next")
SLOWER = [*FAMILIES[3:], *sorted(COVERING.keys() - set(FAMILIES))]
WAYS: tuple[dict[str, Any], ...] = (
    {"tape": "device", "copying": True, "slots": 2},
    {"tape": "host", "copying": True, "slots": 3, "grad_slots": 1},
    {"tape": "host", "copying": False},
    {"tape": "device", "copying": True, "slots": 4, "tile_tokens": 4},
)


@pytest.mark.few(4)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("num_micro", [1, 3])
@pytest.mark.parametrize("sort", SORTS)
def test_steps_are_those_of_late_clipping(sort: str, num_micro: int, way: dict[str, Any]) -> None:
    world = world_of(sort)
    late = Case(sort=sort, steps=steps_of(num_micro), update="late", **way)
    expected = world.play(late)
    assert world.play(replace(late, update="second_backward")).differences(expected) == []
    twice = world.play(replace(late, update="second_backward"), reference=True)
    assert twice.differences(expected) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "family", [*FAMILIES[:3], *(pytest.param(one, marks=pytest.mark.merge) for one in SLOWER)]
)
def test_so_are_those_of_every_structure(family: str, dtype: Any, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, family, COMPUTE_DTYPES[dtype])
    for clip in (1e-2, 1e3):
        late, twice = (_trained(folder, dtype, update, clip) for update in ("late", "twice"))
        assert twice[0] == late[0]
        assert [name for name in late[1] if not torch.equal(late[1][name], twice[1][name])] == []


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_bits_of_their_late_clipping(size: int) -> None:
    case = RankCase(size=size)
    late, twice = (ranks_of(replace(case, update=update)) for update in ("late", "second_backward"))
    for expected, found in zip(late, twice, strict=True):
        assert [r.grad_norm for r in found.results] == [r.grad_norm for r in expected.results]
        assert [r.loss for r in found.results] == [r.loss for r in expected.results]
        for name, values in found.state.items():
            assert torch.equal(values, expected.state[name]), name


def test_a_step_that_does_not_clip_would_be_noticed(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", torch.float32)
    clipped, free = (_trained(folder, "fp32", "twice", clip)[1] for clip in (1e-2, 1e3))
    assert any(not torch.equal(clipped[name], free[name]) for name in clipped)


def _has(kind: TensorKind, dtype: torch.dtype) -> bool:
    return kind.dtype(is_fp32=dtype == torch.float32) is not None


def _trained(folder: Path, dtype: Any, update: str, clip: float) -> tuple[Any, Any]:
    waits = update == "late"
    home = load_model(folder, dtype=dtype, kinds=store_kinds(STATES["adamw"]["fp32"], waits=waits))
    optimizer = AdamW(learning_rate=1e-2, max_grad_norm=clip)
    way = "late" if waits else "second_backward"
    numbers = []
    with make_engine(home.decoder, home.store, optimizer=optimizer, update=way) as engine:
        for step in range(2):
            result = engine.step(make_batch([(2, 12), (1, 9)], seed=step))
            numbers.append((result.micro_losses, result.grad_norm, result.aux_loss))
    params = {
        f"{kind} {param.name}": home.store.param(param.name, kind).clone()
        for param in home.decoder.params
        for kind in home.store.kinds
        if kind is not TensorKind.GRAD and param.trained and _has(kind, param.dtype)
    }
    return numbers, params


def test_nothing_waits_so_eight_bit_states_need_six_bytes() -> None:
    kinds = store_kinds(STATES["adamw"]["8bit"], waits=False)
    assert bytes_per_param(kinds) == pytest.approx(6, abs=0.05)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    sort = "llama of 2 layers"
    world = world_of(sort)
    case = Case(sort=sort, steps=steps_of(2), update="second_backward")
    with world.engine(case) as engine:
        before = world.bytes_of(TensorKind.HI, TensorKind.LO)
        name = world.decoder.blocks[1].params[0].name
        world.store.param(name, TensorKind.HI).view(-1)[0] = math.inf
        broken = world.bytes_of(TensorKind.HI, TensorKind.LO)
        result = engine.step(small_batch(((2, 8), (2, 8)), seed=0))
        assert not result.applied
        assert result.nonfinite is not None
        after = world.bytes_of(TensorKind.HI, TensorKind.LO)
    assert all(torch.equal(after[key], broken[key]) for key in after)
    assert any(not torch.equal(after[key], before[key]) for key in after)


def test_a_second_gradient_that_is_not_finite_ends_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure = Updates.measure

    def broken(self: Updates, op: Any, gradient: Any, step: int) -> None:
        if not op.comes_again:
            gradient[0][1].view(-1)[0] = math.nan
        measure(self, op, gradient, step)

    monkeypatch.setattr(Updates, "measure", broken)
    sort = "llama of 2 layers"
    world = world_of(sort)
    case = Case(sort=sort, steps=steps_of(1), update="second_backward")
    with (
        world.engine(case) as engine,
        pytest.raises(NonFiniteStep, match="in the first backward and not in the second"),
    ):
        engine.step(small_batch(((2, 8),), seed=0))


def test_kept_activations_are_refused() -> None:
    with pytest.raises(ScheduleError, match="second backward"):
        StepShape(num_blocks=4, update="second_backward", kept_layers=1)
    StepShape(num_blocks=4, update="late", kept_layers=1)


def test_it_is_a_setting_of_a_step() -> None:
    assert StepSettings(update="second_backward").gradients_stay is False
