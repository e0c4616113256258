"""The step that `auto` takes: it fits, is fast enough, and half of it would not be."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megatrain.config import Config
from megatrain.planning import step_size
from megatrain.planning.estimate import estimate
from megatrain.planning.from_config import step_size_of
from megatrain.planning.machine.profile import MachineProfile, unmeasured
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.plan import make_plan
from megatrain.planning.search import Search
from megatrain.planning.step_size import (
    ENOUGH,
    FLOOR,
    LEAST_STEPS,
    LONGEST,
    USUAL,
    VERY_LONG,
    StepSize,
    choose_step,
    step_sizes,
)
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, EXPERTS, GIB, PROCESSOR, SERVER, SMALL, llama

NEAR = 0.01
"""The choice compares steps of few layers; here whole ones are played."""
FAST_HOST = DESKTOP.changed(
    name="fast host", dram_bytes_per_s=300e9, update_params_per_s=300e9 / 26
)
SHALLOW = llama(4096, 14336, 4, 32000)
"""Layers as those of 8B, and few of them: quickly simulated."""
PLACES = [(SHALLOW, DESKTOP), (SMALL, PROCESSOR), (SHALLOW, FAST_HOST)]
HERE = unmeasured(ram_bytes=128 * GIB, base_bytes=0, device_bytes=22 * GIB)
Trying = tuple[StepSize, dict[int, str | None]]
"""The chosen size, and the state that each size would have."""


def work(model: ModelShape, sequence: int = 2048) -> Workload:
    return Workload(model=model, step_tokens=sequence, sequence=sequence)


def chosen(
    profile: MachineProfile, workload: Workload, epoch_tokens: int | None = None
) -> StepSize:
    return choose_step(profile, workload, StepSettings(), {}, epoch_tokens)


def speed(profile: MachineProfile, workload: Workload, tokens: int) -> float:
    """Without activations that layers keep: they do not decide."""
    recomputes = {"kept_layers": "for speeds that can be compared"}
    plan = make_plan(profile, workload.with_step(tokens), StepSettings(), recomputes)
    return plan.simulation.tokens_per_s


@pytest.mark.few(2)
@pytest.mark.parametrize(("model", "profile"), PLACES, ids=lambda value: value.name)
def test_it_is_the_smallest_that_is_fast_enough(model: ModelShape, profile: MachineProfile) -> None:
    workload = work(model)
    roomy = profile.changed(ram_bytes=1 << 50)
    enough = ENOUGH * speed(roomy, workload, VERY_LONG * LONGEST)
    size = chosen(profile, workload)
    assert make_plan(profile, workload.with_step(size.tokens)).fits
    assert FLOOR <= size.tokens <= LONGEST
    assert speed(profile, workload, size.tokens) >= enough * (1 - NEAR), size
    half = size.tokens // 2
    assert half < FLOOR or speed(profile, workload, half) < enough * (1 + NEAR), size


def test_enough_is_what_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = []
    for share in (0.5, ENOUGH, 0.99):
        monkeypatch.setattr(step_size, "ENOUGH", share)
        tokens.append(chosen(DESKTOP, work(SHALLOW)).tokens)
    assert tokens == sorted(set(tokens)), "a longer step for more speed"


def with_a_host_tape(profile: MachineProfile, ram: float, workload: Workload) -> Trying:
    """A length that costs host memory: how steps are tried with so many GiB of it."""
    little = profile.changed(ram_bytes=int(ram * GIB))
    settings, pins = StepSettings(tape="host"), {"tape": "set by you"}
    homes: dict[int, str | None] = {}
    for tokens in step_sizes(workload.sequence):
        home = Search(little, workload.with_step(tokens), settings, pins).first_home()
        homes[tokens] = None if home is None else home.state
    return choose_step(little, workload, settings, pins), homes


@pytest.mark.parametrize("ram", [9, 10, 12, 15, 16.5, 17, 18, 20])
def test_it_fits_if_any_step_does_and_exactness_comes_before_length(ram: float) -> None:
    size, homes = with_a_host_tape(DESKTOP, ram, work(SHALLOW))
    fitting = [tokens for tokens, state in homes.items() if state is not None]
    assert (size.tokens in fitting) == bool(fitting)
    assert (size.reason == "no step fits") == (not fitting)
    if size.tokens > FLOOR:
        assert homes[size.tokens] == homes[FLOOR]
    if fitting and size.tokens < FLOOR:
        assert size.tokens == fitting[-1]
        assert size.reason.startswith("a longer one does not fit; ")


@pytest.mark.parametrize("profile", [DESKTOP, HERE], ids=["measured", "unmeasured"])
@pytest.mark.parametrize("epoch", [1, 2047, 49 * 2048, 50 * 2048, 10**6, 10**7, 10**9])
def test_an_epoch_has_fifty_steps_where_the_data_allow(profile: MachineProfile, epoch: int) -> None:
    size = chosen(profile, work(SMALL), epoch)
    assert -(-epoch // size.tokens) >= LEAST_STEPS or size.tokens == 2048
    longer = 2 * size.tokens
    if size.tokens < FLOOR:
        assert -(-epoch // longer) < LEAST_STEPS, "no shorter than it must be"
        assert "epoch" in size.reason


def test_where_nothing_is_enough_it_is_the_longest_that_auto_takes() -> None:
    few = replace(EXPERTS, layer_kinds=EXPERTS.layer_kinds[:4])
    size = chosen(SERVER.changed(device_bytes=24 * GIB), work(few))
    assert size.tokens == LONGEST
    assert size.reason.startswith("auto takes no longer one; ")


def test_a_machine_that_was_not_measured_takes_the_usual_step() -> None:
    size = chosen(HERE, work(SMALL))
    assert size == StepSize(tokens=USUAL, reason="usual; this machine was not measured")
    reasons = set()
    for sixteenths in range(20, 45, 4):
        size, homes = with_a_host_tape(HERE, sixteenths / 16, work(SMALL))
        reasons.add(size.reason)
        assert (homes[size.tokens] is None) == (size.reason == "no step fits")
    assert "a longer one does not fit" in reasons


@pytest.mark.parametrize("row", [512, 3000, 65536, 100_000, 1 << 18])
def test_steps_are_full_rows(row: int) -> None:
    sizes = step_sizes(row)
    assert sizes[0] == row
    assert all(longer == 2 * shorter for shorter, longer in itertools.pairwise(sizes))
    assert sizes[-1] <= max(row, LONGEST) < 2 * max(sizes[-1], LONGEST)
    assert chosen(SERVER, work(SMALL, row)).tokens in sizes


def test_a_micro_batch_that_is_given_fits_the_step() -> None:
    settings = StepSettings(micro_batch_tokens=24576)
    pins = {"micro_batch_tokens": "set by you"}
    size = choose_step(DESKTOP, work(SMALL), settings, pins, 1)
    assert size.tokens == 24576


def test_a_config_with_its_own_step_keeps_it() -> None:
    for given in ({"batch_tokens": "64k"}, {"batch_rows": 8}):
        config = Config(model="a", data="b", train=given)
        assert step_size_of(config, DESKTOP, SMALL) is None
    found = estimate("Qwen3-8B", gpu="4090", ram="192GB", batch_tokens="64k").plan
    assert found.workload.step_tokens == 65536
    assert "batch_tokens" not in found.reasons
    assert "auto:" not in str(found)


def test_the_reason_is_printed_and_recorded() -> None:
    found = estimate("Qwen3-8B", gpu="4090", ram="192GB")
    reason = found.plan.facts()["reasons"]["batch_tokens"]
    assert f"\n          auto: {reason}\n" in str(found)
    assert "\nbatch_tokens " not in str(found), "it is no setting of a step"


def test_the_commonest_desktop_trains_8b_by_default() -> None:
    assert estimate("Qwen3-8B", gpu="24GB", ram="128GB").fits
