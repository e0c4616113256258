"""Laws of planning/narrow_products.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from megatrain.engine.compute import products
from megatrain.engine.compute.products import NarrowWeights
from megatrain.planning.costs import Costs
from megatrain.planning.estimate import Estimate, estimate
from megatrain.planning.memory.device import device_lines
from megatrain.planning.memory.kernels import Kernels
from megatrain.planning.model.skeleton import shape_of
from megatrain.planning.narrow_products import (
    NARROW_WEIGHTS,
    PLANNED_MULTIPLE,
    gain,
    narrow_part,
    narrow_token_bytes,
    narrow_weight_bytes,
)
from megatrain.planning.workload import Workload
from megatrain.step.ops import Op
from megatrain.step.settings import StepSettings
from testkit.machines import DESKTOP, SMALL
from testkit.worlds import Case, world_of

PLAIN = Workload(model=SMALL, step_tokens=2048)
FP8 = replace(PLAIN, products="fp8")
CARD = DESKTOP.changed(fp8_gain=2.0)


def test_the_number_of_a_module_that_needs_torch() -> None:
    assert PLANNED_MULTIPLE == products.MULTIPLE


def test_plain_products_have_nothing_of_this() -> None:
    layer = SMALL.structures[0]
    assert (narrow_part(layer, PLAIN), gain(CARD, PLAIN)) == (0.0, 1.0)
    assert narrow_weight_bytes(PLAIN) == narrow_token_bytes(PLAIN) == 0
    settings = StepSettings(micro_batch_tokens=2048)
    lines = {line.purpose: line.num_bytes for line in device_lines(PLAIN, settings, Kernels(),
                                                                   unified=False)}  # fmt: skip
    assert lines.get(NARROW_WEIGHTS, 0) == 0


def test_products_gain_and_passes_lose() -> None:
    layer, settings = SMALL.structures[0], StepSettings(micro_batch_tokens=2048)
    assert narrow_part(layer, FP8) == 1.0
    for backward in (False, True):
        fewer, more = (
            Costs(CARD, workload, settings).passes(layer, 2048, backward=backward)
            for workload in (PLAIN, FP8)
        )
        assert fewer < more
    without = CARD.changed(fp8_gain=1.0)
    slow = Costs(without, FP8, settings).layer_seconds(layer, 2048)
    plain = Costs(without, PLAIN, settings).layer_seconds(layer, 2048)
    assert Costs(CARD, FP8, settings).layer_seconds(layer, 2048) < slow
    assert plain < slow, "narrowing alone costs time"


@pytest.mark.parametrize("sort", ["llama of 2 layers", "mixtral"])
def test_narrowed_weights_take_what_the_plan_says(
    sort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    visited = NarrowWeights.visited

    @contextmanager
    def watched(self: NarrowWeights, op: Op) -> Iterator[None]:
        with visited(self, op):
            yield
        held.append(sum(one.values.nbytes for one in self._made.values()))

    monkeypatch.setattr(NarrowWeights, "visited", watched)
    world = world_of(sort)
    world.play(Case(sort=sort, steps=(((1, 6), (1, 7)),), update="late"), products="fp8")
    workload = Workload(model=shape_of(world.decoder), step_tokens=13, products="fp8")
    assert max(held) == narrow_weight_bytes(workload) > 0
    assert held[-1] == 0, "the embedding's backward has none"


@pytest.fixture(scope="module")
def estimates() -> dict[str, Estimate]:
    def asked(gpu: str, kind: str) -> Estimate:
        return estimate("Qwen/Qwen2.5-7B", [f"train.products={kind}"], gpu=gpu, ram="256GB")

    found = {kind: asked("4090", kind) for kind in ("plain", "fp8")}
    return found | {"3090": asked("3090", "fp8")}


def _products_line(found: Estimate) -> list[str]:
    return [line for line in str(found).splitlines() if line.startswith("products")]


@pytest.mark.merge
def test_an_estimate_marks_what_nobody_has_tried(estimates: dict[str, Estimate]) -> None:
    rates: dict[str, Any] = {name: found.tokens_per_s for name, found in estimates.items()}
    assert rates["plain"] < rates["fp8"]
    assert _products_line(estimates["plain"]) == []
    assert _products_line(estimates["fp8"]) == [
        "products  fp8, 2 times the rate of bf16 by its sheet: predicted, untested"
    ]
    assert _products_line(estimates["3090"]) == [
        "products  fp8: this machine multiplies no faster so, and narrowing takes time"
    ]
