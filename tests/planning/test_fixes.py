"""Changes that make a run fit: each does, none is more than it takes, and all can be tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatrain.config.sections import LoraSettings
from megatrain.planning.estimate import estimate
from megatrain.planning.fixes import find_fixes
from megatrain.planning.memory.predicted import predicted_ledger
from megatrain.planning.model.partly_trained import with_adapters, with_base
from megatrain.planning.plan import make_plan
from megatrain.planning.search import Search
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, EIGHT, GIB, SERVER, SEVENTY

NO_DISK = {"tier": "set by you"}
TOO_SMALL = [
    ("Llama-3.1-70B", "12GB", "1TB", ["train.batch_tokens=128k"]),
    ("Llama-3.1-70B", "5090", "384GB", []),
    ("Qwen3-14B", "24GB", "128GB", ["data.max_length=4k", "train.batch_tokens=128k"]),
    ("Qwen2.5-7B", "GH200", "480GB", ["data.max_length=2M", "train.batch_tokens=2M"]),
    pytest.param("Qwen3-8B", "3080", "32GB", ["model.dtype=fp32"], marks=pytest.mark.night),
]


@pytest.mark.merge
@pytest.mark.parametrize(("model", "gpu", "ram", "settings"), TOO_SMALL)
def test_settings_that_are_proposed_can_be_tried_and_fit(
    model: str, gpu: str, ram: str, settings: list[str]
) -> None:
    found = estimate(model, settings, gpu=gpu, ram=ram)
    assert not found.fits
    tried = [fix for fix in found.plan.fixes if fix.bought == (0, 0)]
    for fix in tried:
        assert estimate(model, [*settings, *fix.overrides], gpu=gpu, ram=ram).fits, fix.text
    assert tried or any(fix.bought != (0, 0) for fix in found.plan.fixes)


def test_two_changes_together_are_found() -> None:
    """Without a disk 70B in 8-bit states needs 409 GiB and its reserve."""
    eight = StepSettings(state="8bit")
    little = SERVER.changed(ram_bytes=420 * GIB, device_bytes=26 * GIB)
    workload = Workload(model=SEVENTY, step_tokens=131072)
    first, *_ = find_fixes(Search(little, workload, eight, NO_DISK))
    keys = [override.partition("=")[0] for override in first.overrides]
    assert keys == ["model.frozen", "train.batch_tokens"]
    changes: list[dict[str, Any]] = [
        {"model": first.workload.model},
        {"step_tokens": first.workload.step_tokens},
    ]
    for alone in changes:
        assert Search(little, replace(workload, **alone), eight, NO_DISK).best() is None


def test_a_base_that_is_too_large_is_kept_in_fewer_bits() -> None:
    adapted = with_adapters(SEVENTY, LoraSettings(rank=16))
    workload = Workload(model=adapted, step_tokens=8192)
    little = SERVER.changed(ram_bytes=50 * GIB)
    offered = [fix.overrides for fix in find_fixes(Search(little, workload, pins=NO_DISK))]
    assert ("model.base=nf4",) in offered
    narrow = replace(workload, model=with_base(adapted, "nf4"))
    smaller = SERVER.changed(ram_bytes=30 * GIB)
    offered = [fix.overrides for fix in find_fixes(Search(smaller, narrow, pins=NO_DISK))]
    assert not any("model.base" in override for fix in offered for override in fix)


@pytest.mark.merge
def test_memory_to_buy_comes_in_the_sizes_that_are_sold() -> None:
    workload = Workload(model=EIGHT, step_tokens=8192)
    least = Search(DESKTOP.changed(ram_bytes=1), workload).smallest()
    needs = predicted_ledger(DESKTOP, workload, least).total("host")
    little = DESKTOP.changed(ram_bytes=int(needs * 1.04) - (146 << 20))
    fix = next(fix for fix in find_fixes(Search(little, workload, pins=NO_DISK)) if fix.bought[1])
    assert fix.bought[1] == 128 * GIB
    assert f"free (now {little.ram_bytes / GIB:.1f} GiB)" in fix.text
    large = SERVER.changed(ram_bytes=32 * GIB)
    longer = (Workload(model=EIGHT, step_tokens=tokens) for tokens in (8192, 1 << 21))
    sizes = {find_fixes(Search(large, work, pins=NO_DISK))[-1].bought[1] // GIB for work in longer}
    assert len(sizes) == 2


@pytest.mark.merge
def test_one_and_a_half_terabytes_are_known() -> None:
    fixes = estimate(
        "Mistral-Large", ["optim.state=bf16"], gpu="H200", ram="960GB", batch_tokens="192k"
    ).plan.fixes
    assert any(fix.bought[1] == 1536 * GIB for fix in fixes), [fix.text for fix in fixes]


def test_packing_is_given_up_where_its_masks_are_what_does_not_fit() -> None:
    masked = replace(EIGHT, by_document=False)
    workload = Workload(model=masked, step_tokens=524288, sequence=524288, packed=True)
    fixes = find_fixes(Search(SERVER, workload))
    assert any(fix.overrides == ("data.packing=false",) for fix in fixes)
    for other in ({"packed": False}, {"attn": "flash_attention_2"}, {"model": EIGHT}):
        assert Search(SERVER, replace(workload, **other)).best() is not None


@pytest.mark.merge
def test_steps_that_are_counted_in_rows_are_shortened_in_rows() -> None:
    settings = ["train.batch_rows=64", "data.max_length=2k"]
    found = estimate("Qwen3-14B", settings, gpu="3090", ram="120GB")
    assert not found.fits
    (rows,) = (fix for fix in found.plan.fixes if "train.batch_rows=16" in fix.overrides)
    assert estimate("Qwen3-14B", [*settings, *rows.overrides], gpu="3090", ram="120GB").fits


def test_what_the_user_decided_is_not_undone() -> None:
    workload = Workload(model=EIGHT, step_tokens=32768)
    settings = StepSettings(micro_batch_tokens=16384, slots=4, tape="host")
    pins = dict.fromkeys(("micro_batch_tokens", "slots", "tape"), "set by you")
    for fix in find_fixes(Search(DESKTOP.changed(ram_bytes=40 * GIB), workload, settings, pins)):
        assert make_plan(fix.profile, fix.workload, fix.settings, pins).fits, fix.text
        assert fix.workload.step_tokens >= 16384


@pytest.mark.parametrize(
    ("ram", "state", "farther"), [(80, "bf16", "0.2 %"), (60, "8bit", "1 to 2 %")]
)
def test_where_fp32_does_not_fit_the_most_exact_state_that_does_is_named_with_its_price(
    ram: int, state: str, farther: str
) -> None:
    """Its memory, its speed against fp32 in enough memory, and what it costs in exactness."""
    workload = Workload(model=EIGHT, step_tokens=8192)
    first, *_ = find_fixes(Search(DESKTOP.changed(ram_bytes=ram * GIB), workload))
    assert first.overrides == (f"optim.state={state}",)
    plan = make_plan(first.profile, first.workload, first.settings)
    exact = make_plan(DESKTOP.changed(ram_bytes=1 << 42), workload)
    assert plan.fits
    assert plan.settings.state == state
    how, price, speed = first.text.splitlines()
    assert how == f"optim.state={state} ({plan.places()['host']}, {plan.speed})"
    assert price.endswith(f"so weights move {farther} farther")
    assert f"{exact.step_s / plan.step_s - 1:+.0%} tok/s against fp32" in speed


def test_the_least_exact_state_has_no_other_to_offer() -> None:
    search = Search(
        DESKTOP.changed(ram_bytes=40 * GIB),
        Workload(model=EIGHT, step_tokens=8192),
        StepSettings(state="8bit"),
    )
    assert not any("optim.state" in fix.text for fix in find_fixes(search))


def test_full_rows_that_the_user_wants_are_given_up_first() -> None:
    workload = Workload(model=EIGHT, step_tokens=131072, sequence=131072, packed=True)
    settings, pins = StepSettings(state="8bit"), {"tile_tokens": "set by you"}
    first, *_ = find_fixes(Search(DESKTOP, workload, settings, pins))
    assert first.overrides == ("memory.tile_tokens=auto",)
    assert make_plan(first.profile, first.workload, first.settings, first.pins).fits
