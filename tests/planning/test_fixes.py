"""Changes that make a run fit: each does, none is more than it takes, and all can be tried."""

from __future__ import annotations

import pytest

from megatrain.planning.estimate import estimate
from megatrain.planning.fixes import find_fixes
from megatrain.planning.plan import make_plan
from megatrain.planning.search import Search
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, EIGHT, GIB, SERVER

TOO_SMALL = [
    ("Llama-3.1-70B", "24GB", "1TB", []),
    ("Llama-3.1-70B", "5090", "870GB", []),
    ("Qwen3-14B", "24GB", "210GB", ["data.max_length=4k"]),
    ("Qwen2.5-7B", "GH200", "480GB", ["data.max_length=128k", "train.batch_tokens=512k"]),
    pytest.param("Qwen3-8B", "3080", "256GB", ["model.dtype=fp32"], marks=pytest.mark.nightly),
]


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


def test_three_changes_together_are_found() -> None:
    first, *_ = estimate("Llama-3.1-70B", gpu="5090", ram="870GB").plan.fixes
    keys = [override.partition("=")[0] for override in first.overrides]
    assert keys == ["train.max_grad_norm", "model.frozen", "train.batch_tokens"]
    for left_out in first.overrides:
        fewer = [override for override in first.overrides if override != left_out]
        assert not estimate("Llama-3.1-70B", fewer, gpu="5090", ram="870GB").fits, left_out


def test_memory_to_buy_comes_in_the_sizes_that_are_sold() -> None:
    workload = Workload(model=EIGHT, step_tokens=8192)
    needs = make_plan(DESKTOP.changed(ram_bytes=512 * GIB), workload).ledger.total("host")
    little = DESKTOP.changed(ram_bytes=int(needs * 1.04) - (146 << 20))
    fix = next(fix for fix in find_fixes(Search(little, workload)) if fix.bought[1])
    assert fix.bought[1] == 128 * GIB
    assert f"free (now {little.ram_bytes / GIB:.1f} GiB)" in fix.text
    large = SERVER.changed(ram_bytes=64 * GIB)
    sizes = {
        find_fixes(Search(large, Workload(model=EIGHT, step_tokens=tokens)))[-1].bought[1] // GIB
        for tokens in (8192, 1 << 21)
    }
    assert len(sizes) == 2


def test_one_and_a_half_terabytes_are_known() -> None:
    fixes = estimate("Llama-3.1-70B", gpu="5090", ram="768GB", batch_tokens="256k").plan.fixes
    assert any(fix.bought[1] == 1536 * GIB for fix in fixes), [fix.text for fix in fixes]


def test_packing_is_given_up_where_its_masks_are_what_does_not_fit() -> None:
    settings = ["data.max_length=128k", "train.batch_tokens=512k"]
    found = estimate("Qwen2.5-7B", settings, gpu="GH200")
    assert any(fix.overrides == ("data.packing=false",) for fix in found.plan.fixes)
    plan = estimate("Qwen2.5-7B", [*settings, "data.packing=false"], gpu="GH200").plan
    assert plan.fits
    assert plan.settings.micro_batch_tokens == 131072
    assert estimate("Qwen2.5-7B", [*settings, "model.attn=flash_attention_2"], gpu="GH200").fits


def test_steps_that_are_counted_in_rows_are_shortened_in_rows() -> None:
    settings = ["train.batch_rows=64", "data.max_length=2k"]
    found = estimate("Qwen3-14B", settings, gpu="3090", ram="250GB")
    assert not found.fits
    (rows,) = (fix for fix in found.plan.fixes if "train.batch_rows=32" in fix.overrides)
    assert estimate("Qwen3-14B", [*settings, *rows.overrides], gpu="3090", ram="250GB").fits


def test_what_the_user_decided_is_not_undone() -> None:
    workload = Workload(model=EIGHT, step_tokens=32768)
    settings = StepSettings(micro_batch_tokens=16384, slots=4, tape="host")
    pins = dict.fromkeys(("micro_batch_tokens", "slots", "tape"), "set by you")
    for fix in find_fixes(Search(DESKTOP.changed(ram_bytes=60 * GIB), workload, settings, pins)):
        assert make_plan(fix.profile, fix.workload, settings, pins).fits, fix.text
        assert fix.workload.step_tokens >= 16384
