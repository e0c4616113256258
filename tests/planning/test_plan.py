"""A plan fits and says why, or does not and says what would."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from megatrain.errors import DoesNotFit
from megatrain.planning.fixes import MOST, find_fixes
from megatrain.planning.machine.profile import MachineProfile, unmeasured
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.search import Search, shortfalls
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.effort import require_effort
from testkit.machines import (
    DESKTOP,
    EIGHT,
    EXPERTS,
    GIB,
    LARGEST,
    PROCESSOR,
    SERVER,
    SEVENTY,
    SMALL,
    llama,
)

FITTING = [(SMALL, DESKTOP), (SMALL, PROCESSOR), (EIGHT, DESKTOP), (SEVENTY, SERVER)]
TIED = llama(3072, 8192, 28, 128256, tie_word_embeddings=True)
TOO_SMALL = [
    DESKTOP.changed(name="64 GiB", ram_bytes=60 * GIB),
    DESKTOP.changed(name="small card", device_bytes=3 * GIB),
    DESKTOP.changed(name="both small", ram_bytes=30 * GIB, device_bytes=4 * GIB),
    PROCESSOR.changed(name="processor", ram_bytes=16 * GIB),
    SERVER.changed(name="400 GiB", ram_bytes=380 * GIB, device_bytes=22 * GIB),
]
REFUSED = [
    (model, profile)
    for model, profile in itertools.product((EIGHT, EXPERTS, SEVENTY, LARGEST, TIED), TOO_SMALL)
    if not (profile.name == "400 GiB" and model in (EIGHT, EXPERTS, TIED))
    if not (profile.name == "64 GiB" and model is TIED)
]


def plan_of(model: ModelShape, profile: MachineProfile, tokens: int = 32768) -> Plan:
    return make_plan(profile, Workload(model=model, step_tokens=tokens))


@pytest.mark.parametrize(("model", "profile"), FITTING, ids=lambda value: value.name)
def test_a_plan_that_fits(model: ModelShape, profile: MachineProfile) -> None:
    plan = plan_of(model, profile)
    assert plan.fits
    assert shortfalls(profile, plan.ledger) == {}
    assert set(plan.reasons) <= set(plan.settings.facts())
    assert all(plan.reasons.values())
    assert plan.lever
    assert plan.bottleneck in str(plan)
    plan.require()


@pytest.mark.merge
@pytest.mark.parametrize(("model", "profile"), REFUSED, ids=lambda value: value.name)
def test_each_fix_applied_fits(model: ModelShape, profile: MachineProfile) -> None:
    workload = Workload(model=model, step_tokens=32768)
    plan = make_plan(profile, workload)
    assert not plan.fits
    assert 1 <= len(plan.fixes) <= MOST
    assert [fix.cost for fix in plan.fixes] == sorted(fix.cost for fix in plan.fixes)
    for fix in plan.fixes:
        assert make_plan(fix.profile, fix.workload, fix.settings).fits, fix.text
    assert plan.fixes[0].text.splitlines()[0] in str(plan).replace("\n    and ", "; ")
    with pytest.raises(DoesNotFit, match=r"does not fit: .* memory .* short\. Ways out:"):
        plan.require()


def test_the_cheapest_comes_first() -> None:
    """8B with 8-bit states needs 6 bytes a parameter, where backward runs twice: 50 GiB."""
    little = DESKTOP.changed(ram_bytes=45 * GIB)
    workload = Workload(model=EIGHT, step_tokens=8192)
    first, *others = find_fixes(Search(little, workload, StepSettings(state="8bit")))
    assert first.overrides == ("model.frozen=[model.embed_tokens*,lm_head*]",)
    assert any(fix.bought[1] == 64 * GIB for fix in others)
    assert all(fix.cost >= first.cost for fix in others)


def test_a_second_backward_comes_before_a_smaller_model_and_a_disk() -> None:
    little = DESKTOP.changed(ram_bytes=100 * GIB)
    plan = make_plan(little, Workload(model=EIGHT, step_tokens=8192))
    assert plan.fits
    assert plan.settings.update == "second_backward"
    assert re.fullmatch(r"waiting gradients are .* GiB short", plan.reasons["update"])
    assert "second_backward waiting gradients" in str(plan)
    assert "train.max_grad_norm=null" in plan.lever


@pytest.mark.parametrize("details", [False, True])
def test_rows_add_up_to_their_place_and_what_is_short_to_the_rest(details: bool) -> None:
    plan = plan_of(SEVENTY, SERVER.changed(ram_bytes=380 * GIB))
    rows = plan.text(details=details).splitlines()
    start = next(i for i, row in enumerate(rows) if row.startswith("host "))
    total, has, short = (float(part) for part in re.findall(r"[\d.]+(?= GiB)", rows[start]))
    assert short == pytest.approx(total - has, abs=0.11)
    lines = itertools.takewhile(lambda row: row.startswith("  "), rows[start + 1 :])
    sizes = [(float(row.split()[-2]), row.split()[-1]) for row in lines]
    gibs = [size / (1024 if unit == "MiB" else 1) for size, unit in sizes]
    assert sum(gibs) == pytest.approx(total, abs=0.5)
    assert any("reserve, kept free" in row for row in rows) == details
    assert any(re.fullmatch(r"  \d+ others +.*", row) for row in rows) != details


@pytest.mark.merge
def test_the_verdict_is_one_line() -> None:
    plan = plan_of(EIGHT, DESKTOP)
    predicted, memory = plan.verdict("1B tokens in 6 d").split("; ")
    assert predicted == f"fits: {plan.speed}, 1B tokens in 6 d, predicted"
    assert re.fullmatch(r"[\d.]+k? to [\d.]+k? tok/s", plan.speed)
    host, device, disk = memory.split(", ")
    assert re.fullmatch(r"host \d+ of \d+ GiB", host)
    assert re.fullmatch(r"device [\d.]+ of [\d.]+ GiB", device)
    assert re.fullmatch(r"disk \d+ GiB", disk)
    refused = plan_of(SEVENTY, DESKTOP)
    assert re.fullmatch(r"does not fit: host memory \d+\.\d GiB short.*", refused.verdict())


def test_a_fit_with_hardly_any_host_memory_to_spare_is_tight() -> None:
    needs = shortfalls(DESKTOP.changed(ram_bytes=1), plan_of(SMALL, DESKTOP).ledger)["host"]
    for spare, tight in ((0.04, True), (0.06, False)):
        plan = plan_of(SMALL, DESKTOP.changed(ram_bytes=int(needs / (1 - spare))))
        assert plan.fits
        assert plan.is_tight is tight is plan.facts()["tight"]
        assert ("(tight)" in plan.verdict()) is tight
    assert not plan_of(SEVENTY, DESKTOP).is_tight, "it does not fit"


def test_a_machine_without_a_measured_speed_has_none_in_its_verdict() -> None:
    unknown = unmeasured(ram_bytes=200 * GIB, base_bytes=0, device_bytes=22 * GIB)
    verdict = make_plan(unknown, Workload(model=EIGHT, step_tokens=8192)).verdict()
    assert verdict.startswith("fits: host ")


def test_what_takes_turns_is_named_with_its_shares() -> None:
    short = make_plan(DESKTOP, Workload(model=EIGHT, step_tokens=8192))
    assert re.search(
        r"limit     optimizer \d\d%, then compute \d\d% \(not overlapped\)", str(short)
    )
    long = make_plan(DESKTOP, Workload(model=EIGHT, step_tokens=65536))
    assert "limit     compute-bound: only a faster device would help" in str(long)


def test_the_lever_moves_what_limits() -> None:
    slow = DESKTOP.changed(copy_in_bytes_per_s=2e9, device_bytes=6 * GIB)
    few = Workload(model=SMALL, step_tokens=2048)
    plan = make_plan(slow, few)
    assert plan.bottleneck == "link in"
    assert plan.lever.startswith("train.batch_tokens=8192 (now 2048)")
    more = make_plan(slow, replace(few, step_tokens=8192))
    assert more.simulation.tokens_per_s > 1.2 * plan.simulation.tokens_per_s


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("model", "profile"), [*FITTING, *REFUSED[:6]], ids=lambda value: value.name
)
def test_it_reads_well_at_80_columns(model: ModelShape, profile: MachineProfile) -> None:
    text = str(plan_of(model, profile))
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in text
    assert text.isascii()


def test_data_that_is_shorter_than_a_step_takes_the_time_of_what_it_has() -> None:
    plan = plan_of(SMALL, PROCESSOR)
    short = plan.with_epoch(94)
    assert short.simulation.tokens == 94
    assert short.step_s < plan.step_s / 10
    assert (short.settings, short.ledger) == (plan.settings, plan.ledger)
    assert "the data has 94 tokens: no step has more" in str(short)
    assert short.with_setting("slots", 3, "asked").simulation.tokens == 94
    assert plan.with_epoch(plan.workload.step_tokens) is plan


def test_a_user_who_set_everything_is_told_so() -> None:
    settings = StepSettings(micro_batch_tokens=4096, slots=2, tape="host", chunk_tokens=512)
    pins = dict.fromkeys(("micro_batch_tokens", "slots", "tape", "chunk_tokens"), "set by you")
    plan = make_plan(DESKTOP, Workload(model=EIGHT, step_tokens=8192), settings, pins)
    assert {plan.reasons[name] for name in ("micro_batch_tokens", "slots", "tape")} == {
        "set by you"
    }


@pytest.mark.merge
def test_planning_the_largest_with_bounded_effort() -> None:
    def plan() -> None:
        assert plan_of(LARGEST, SERVER, 64 * 8192).fits

    require_effort(plan, at_most=400)


def test_planning_a_usual_model_with_little_effort() -> None:
    workload = Workload(model=EIGHT, step_tokens=131072)
    settings = StepSettings(state="bf16")
    require_effort(lambda: make_plan(DESKTOP, workload, settings), at_most=20)


@pytest.mark.merge
def test_a_refusal_and_the_price_of_less_exact_states_with_bounded_effort() -> None:
    """It makes two more plans: with those states, and with fp32 in enough memory."""

    def refused() -> None:
        assert not plan_of(EIGHT, DESKTOP, 131072).fits

    require_effort(refused, at_most=60)


def test_wear_is_printed_where_a_disk_is_used() -> None:
    disk = DESKTOP.changed(ram_bytes=48 * GIB, disk_bytes=2000 * GIB)
    plan = make_plan(disk, Workload(model=EIGHT, step_tokens=8192))
    assert plan.fits
    assert plan.settings.tier == "states"
    assert plan.wear is not None
    assert (
        plan.wear.step_bytes == plan.ledger.total("tier") == pytest.approx(10 * EIGHT.params, 0.01)
    )
    assert plan.wear.day_bytes == pytest.approx(86400 / plan.step_s * plan.wear.step_bytes)
    text = str(plan)
    assert f"a step writes {plan.wear.step_bytes / GIB:.1f} GiB to the disk" in text
    assert re.search(r"a drive rated for 600 TB lasts .*, for 1,200 TB \d", text)
    assert plan.facts()["wear"]["day_bytes"] == plan.wear.day_bytes
    assert make_plan(DESKTOP, Workload(model=EIGHT, step_tokens=8192)).wear is None


def test_a_disk_that_is_not_used_is_named() -> None:
    disk = DESKTOP.changed(disk_bytes=2000 * GIB)
    for profile in (disk, DESKTOP):
        plan = make_plan(profile, Workload(model=EIGHT, step_tokens=8192))
        assert plan.settings.tier == "none"
        named = re.search(r"tier +none +memory\.disk is not used: host memory", str(plan))
        assert (named is not None) == bool(profile.disk_bytes)
