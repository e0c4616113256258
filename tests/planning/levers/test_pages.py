"""Pages of experts: only where layers do not fit, and counted as they cross the link."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.engine import pages as engine_pages
from megatrain.errors import ConfigError
from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.costs import Cost, Costs
from megatrain.planning.levers.pages import (
    PLANNED_PAGE_SLOTS,
    ExpertPages,
    num_experts,
    page_slot_bytes,
)
from megatrain.planning.search import Search
from megatrain.planning.simulate import shared_speeds, simulate, steady_step, step_shape
from megatrain.planning.workload import Workload
from megatrain.step.ops import OpKind
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, EIGHT, GIB

MIXTURE = find_known_model("Qwen3-30B-A3B").shape
LAYER = MIXTURE.structures[0]
EXPERTS = 128 * 3 * 2048 * 768
WORKLOAD = Workload(model=MIXTURE, step_tokens=8192)
PAGED = StepSettings(micro_batch_tokens=4096, expert_pages=8)


def test_numbers_of_modules_that_need_torch() -> None:
    assert PLANNED_PAGE_SLOTS == engine_pages.PAGE_SLOTS


def _search(device_gib: float, **changes: Any) -> Search:
    profile = DESKTOP.changed(ram_bytes=512 * GIB, device_bytes=round(device_gib * GIB))
    return Search(profile, WORKLOAD, **changes)


@functools.cache
def _settings(device_gib: float) -> tuple[StepSettings, dict[str, str]]:
    search = _search(device_gib)
    best = search.best()
    assert best is not None
    return best.settings, search.reasons(best.settings)


def test_experts_come_in_pages_where_layers_do_not_fit_and_only_there() -> None:
    roomy, reasons = _settings(32)
    assert roomy.expert_pages == 1
    assert reasons["expert_pages"] == "all experts of a layer fit"
    small, reasons = _settings(7)
    assert small.expert_pages > 1
    assert re.fullmatch(r"(all at once|\d+) needs .* more device memory", reasons["expert_pages"])


def test_a_model_without_experts_does_not_name_them() -> None:
    search = Search(DESKTOP, Workload(model=EIGHT, step_tokens=8192))
    best = search.best()
    assert best is not None
    assert best.settings.expert_pages == 1
    assert "expert_pages" not in search.reasons(best.settings)


def test_the_device_has_two_pages_whatever_the_number_of_experts() -> None:
    gate_up = 2 * 2048 * 768
    assert page_slot_bytes(WORKLOAD, PAGED) == 2 * 2 * (128 // 8) * gate_up
    assert page_slot_bytes(WORKLOAD, PAGED.changed(expert_pages=1)) == 0
    assert num_experts(MIXTURE) == 128


def test_experts_cross_three_times_for_each_micro_batch() -> None:
    costs = Costs(DESKTOP, WORKLOAD, PAGED)
    ops = steady_step(step_shape(PAGED, WORKLOAD, unified=False))
    moved = {
        kind: sum(costs.of(op).num_bytes for op in ops if op.kind is kind and op.block == 5)
        for kind in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.FETCH, OpKind.DRAIN)
    }
    rest = LAYER.weight_bytes("bf16") - 2 * EXPERTS
    assert moved[OpKind.FORWARD] == 2 * 2 * EXPERTS
    assert moved[OpKind.BACKWARD] == 2 * 2 * 2 * EXPERTS
    assert moved[OpKind.FETCH] == 2 * rest
    assert moved[OpKind.DRAIN] == LAYER.gradient_bytes("bf16")


def test_a_step_that_waits_for_pages_is_limited_by_the_link() -> None:
    slow = DESKTOP.changed(copy_in_bytes_per_s=1e9)
    assert simulate(slow, WORKLOAD, PAGED).bottleneck == "link in"
    fast = DESKTOP.changed(copy_in_bytes_per_s=1e13, update_params_per_s=1e12)
    assert simulate(fast, WORKLOAD, PAGED).bottleneck == "compute"


def test_a_share_of_one_direction_leaves_the_other_alone() -> None:
    half = Cost(seconds=1.0, link="in", link_share=0.5)
    fetch, drain = Cost(seconds=1.0, link="in"), Cost(seconds=1.0, link="out")
    duplex = DESKTOP.changed(duplex_share=1.0)
    assert shared_speeds([half, half], duplex) == [1.0, 1.0]
    assert shared_speeds([half, drain], duplex) == [1.0, 1.0]
    assert shared_speeds([half, fetch], duplex)[1] == pytest.approx(2 / 3)
    less = shared_speeds([half, drain], duplex.changed(duplex_share=0.8))
    assert less == pytest.approx([0.9, 0.8])


def _config(**sections: Any) -> Config:
    model = {"name_or_path": "x"}
    return Config.model_validate({"model": model, "data": {"train": "x"}, **sections})


def test_pages_of_what_has_no_experts_are_refused() -> None:
    config = _config(memory={"expert_pages": 4})
    with pytest.raises(ConfigError, match="has no experts"):
        ExpertPages().check(config, EIGHT)
    ExpertPages().check(config, MIXTURE)
    assert ExpertPages().why_not_compiled(config) == "experts come in pages"
    assert ExpertPages().why_not_compiled(_config()) == ""


def test_pages_and_compiled_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="a compiled layer reads its experts at once"):
        _config(memory={"expert_pages": 4}, train={"compile": True}).decided()
