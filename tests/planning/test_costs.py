"""The cost of an update follows the states that the optimizer declares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatrain.config.sections import LoraSettings
from megatrain.memory.kinds import TensorKind
from megatrain.optim import muon
from megatrain.optim.states import ADAMW, STATES
from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.costs import (
    EAGER,
    EAGER_BACKWARD,
    FUSED,
    FUSED_BACKWARD,
    NUM_PRODUCT_STEPS,
    Cost,
    Costs,
    elementwise_bytes,
)
from megatrain.planning.model.partly_trained import with_adapters
from megatrain.planning.model.shapes import MediaShape, ModelShape
from megatrain.planning.simulate import steady_step, step_shape
from megatrain.planning.workload import Workload
from megatrain.step.ops import OpKind, Role
from megatrain.step.settings import StepSettings
from testkit.lion import LION
from testkit.machines import DESKTOP, EIGHT, PROCESSOR, SMALL

SETTINGS = StepSettings(micro_batch_tokens=2048)
PROFILE = replace(DESKTOP, op_overhead_s=1e-12)


def cost_of(kind: OpKind, states: tuple[TensorKind, ...]) -> Cost:
    workload = Workload(model=SMALL, step_tokens=2048, states={"fp32": states})
    ops = steady_step(step_shape(SETTINGS, workload, unified=False))
    return Costs(PROFILE, workload, SETTINGS).of(next(op for op in ops if op.kind is kind))


def test_an_update_takes_the_traffic_of_its_states() -> None:
    adamw, lion = (cost_of(OpKind.UPDATE, states) for states in (ADAMW, LION))
    assert lion.seconds / adamw.seconds == pytest.approx(18 / 26)
    assert lion.dram_rate == pytest.approx(adamw.dram_rate)
    num_params = adamw.num_bytes / 2
    assert adamw.seconds == pytest.approx(num_params / PROFILE.update_params_per_s)


def muon_costs(tokens: int = 2048, **changes: Any) -> dict[OpKind, Cost]:
    model = SMALL.with_matrices_apart()
    workload = Workload(model=model, step_tokens=tokens, states=STATES["muon"])
    settings = SETTINGS.changed(state="bf16", **changes)
    ops = steady_step(step_shape(settings, workload, unified=False))
    costs = Costs(PROFILE, workload, settings)
    return {op.kind: costs.of(op) for op in ops if op.block == 1}


def test_matrices_cost_two_passes_two_copies_and_products_of_their_smaller_side() -> None:
    found, layer = muon_costs(), SMALL.with_matrices_apart().structures[0]
    elements = layer.matrix_elements()
    rate = PROFILE.update_params_per_s * 26
    assert found[OpKind.MOMENTUM].seconds == pytest.approx(8 * elements / rate)
    others = layer.trained_elements() - elements
    assert found[OpKind.UPDATE].seconds == pytest.approx((10 * elements + 18 * others) / rate)
    for kind in (OpKind.SEND, OpKind.RETURN):
        assert found[kind].num_bytes == 2 * elements
    assert NUM_PRODUCT_STEPS == muon.NUM_STEPS
    least = sum(
        NUM_PRODUCT_STEPS * 2 * min(t.shape) ** 2 * (2 * max(t.shape) + min(t.shape))
        for t in layer.matrices
    ) / max(point.flops for point in PROFILE.forward_flops)
    assert found[OpKind.ORTHOGONALIZE].seconds >= least > 0


def test_a_loss_that_needs_log_probabilities_first_costs_one_more_projection() -> None:
    def head_of(workload: Workload) -> float:
        ops = steady_step(step_shape(SETTINGS, workload, unified=False))
        head = next(op for op in ops if op.kind is OpKind.HEAD)
        return Costs(PROFILE, workload, SETTINGS).of(head).seconds

    once = Workload(model=SMALL, step_tokens=2048)
    assert 1.1 < head_of(replace(once, projects_twice=True)) / head_of(once) < 1.5


def test_a_layer_takes_no_less_than_the_host_takes_to_issue_it() -> None:
    workload = Workload(model=SMALL, step_tokens=2048)
    ops = steady_step(step_shape(SETTINGS, workload, unified=False))
    known = Costs(PROFILE, workload, SETTINGS)
    most = max(known.of(op).seconds for op in ops if op.lane == "compute")
    slow = replace(PROFILE, forward_issue_s=2 * most, backward_issue_s=3 * most)
    fast = replace(PROFILE, forward_issue_s=1e-12, backward_issue_s=1e-12)
    for op in ops:
        said, cost = Costs(slow, workload, SETTINGS).of(op), known.of(op)
        if op.role is Role.LAYER and op.lane == "compute":
            times = 2 if op.kind is OpKind.FORWARD else 3
            assert said.seconds == pytest.approx(times * most)
        else:
            assert said == cost
        assert Costs(fast, workload, SETTINGS).of(op) == cost


@pytest.mark.parametrize(
    ("name", "normed"),
    [
        ("Qwen/Qwen3-8B", 2 * 4096 + (32 + 8) * 128),  # all heads of queries and keys
        ("Qwen/Qwen2.5-7B", 2 * 3584),  # biases as wide as the model are no norms
        ("allenai/OLMo-2-1124-7B", 4 * 4096),  # one norm over all heads
        ("deepseek-ai/DeepSeek-V3", 2 * 7168 + 1536 + 512),
    ],
)
def test_every_norm_of_a_layer_is_counted_once(name: str, normed: int) -> None:
    shape = find_known_model(name).shape
    layer = shape.blocks[shape.num_blocks // 2]
    bare = replace(layer, tensors=tuple(t for t in layer.tensors if len(t.shape) > 1))
    difference = elementwise_bytes(layer, shape.hidden) - elementwise_bytes(bare, shape.hidden)
    assert difference == EAGER.normed * (normed - shape.hidden), (
        "one norm is assumed without weights"
    )


def test_fused_layers_make_fewer_passes_on_a_device() -> None:
    plain = Workload(model=SMALL, step_tokens=2048)
    fused = (replace(plain, kernels="liger"), replace(plain, compiled=True))
    for backward in (False, True):
        for machine, is_less in ((DESKTOP, True), (PROCESSOR, False)):
            eager, *others = (
                Costs(machine, workload, SETTINGS).passes(SMALL.blocks[1], 2048, backward=backward)
                for workload in (plain, *fused)
            )
            assert [other < 0.5 * eager for other in others] == [is_less] * 2


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("Qwen/Qwen3-8B", (755.7, 1735, 197.3, 347)),
        ("Qwen/Qwen2.5-7B", (573.5, 1249, 202.3, 366)),
    ],
)
def test_element_wise_work_is_what_benchmarks_fused_counts(
    name: str, counted: tuple[float, ...]
) -> None:
    """Kilobytes per token of a layer: forward and backward, eager and fused."""
    shape = find_known_model(name).shape
    for per, expected in zip((EAGER, EAGER_BACKWARD, FUSED, FUSED_BACKWARD), counted, strict=True):
        moved = elementwise_bytes(shape.layers[0], shape.hidden, per)
        assert moved / 1000 == pytest.approx(expected, rel=0.06)


def test_experts_wait_where_they_have_no_kernel() -> None:
    dense = SMALL.blocks[1]
    experts = replace(dense, num_experts=8, experts_per_token=2)
    waiting = PROFILE.changed(expert_wait_s=0.125)
    workload = Workload(model=SMALL, step_tokens=2048)
    for block, wait_s in ((dense, 0.0), (experts, 0.125)):
        slow, quick = (
            Costs(profile, workload, SETTINGS).layer_seconds(block, 2048)
            for profile in (waiting, PROFILE)
        )
        assert slow - quick == pytest.approx(wait_s)


def test_backward_of_a_kept_layer_costs_what_it_costs_without_its_forward() -> None:
    workload = Workload(model=EIGHT, step_tokens=4096)

    def seconds(kept_layers: int) -> dict[OpKind, float]:
        settings = SETTINGS.changed(kept_layers=kept_layers)
        ops = steady_step(step_shape(settings, workload, unified=False))
        costs = Costs(PROFILE, workload, settings)
        return {op.kind: costs.of(op).seconds for op in ops if op.block == 3 and op.micro == 0}

    recomputed, kept = seconds(0), seconds(EIGHT.num_layers)
    assert kept[OpKind.FORWARD] == recomputed[OpKind.FORWARD]
    saved = recomputed[OpKind.BACKWARD] - kept[OpKind.BACKWARD]
    assert saved == pytest.approx(kept[OpKind.FORWARD], rel=1e-6)


def test_a_frozen_base_has_no_gradients_to_compute_or_to_drain() -> None:
    """Of 2 + 2 + 4 FLOPs per weight, forward again in backward included, 2 + 2 + 2 are left."""
    adapted = with_adapters(replace(EIGHT, tied=False), LoraSettings(rank=16))

    def seconds(model: ModelShape) -> dict[OpKind, Cost]:
        workload = Workload(model=model, step_tokens=4096)
        ops = steady_step(step_shape(SETTINGS, workload, unified=False))
        costs = Costs(PROFILE, workload, SETTINGS)
        return {op.kind: costs.of(op) for op in ops if op.block == 3}

    whole, frozen = seconds(EIGHT), seconds(adapted)
    assert frozen[OpKind.FETCH].num_bytes == pytest.approx(whole[OpKind.FETCH].num_bytes, rel=0.01)
    assert frozen[OpKind.DRAIN].num_bytes < 0.01 * whole[OpKind.DRAIN].num_bytes
    assert frozen[OpKind.UPDATE].seconds < 0.01 * whole[OpKind.UPDATE].seconds
    assert 1.0 < frozen[OpKind.FORWARD].seconds / whole[OpKind.FORWARD].seconds < 1.2
    assert 0.66 < frozen[OpKind.BACKWARD].seconds / whole[OpKind.BACKWARD].seconds < 0.9
    layer = adapted.structures[0]
    assert layer.gradient_flops_per_token < 0.02 * layer.matmul_flops_per_token


def test_projectors_and_trained_towers_cost_their_products_with_the_embedding() -> None:
    """Forward once more on the way back; of rows as most are, not of the densest."""
    media = MediaShape(
        densest=((512, 512), (2048, 1024)), sent_bytes=0.0, item_tokens=256, held_bytes=(0, 0, 0),
        forward_flops=1e15, backward_flops=2e15,
    )  # fmt: skip

    def seconds(media: MediaShape | None, kind: OpKind) -> float:
        workload = Workload(model=replace(SMALL, media=media), step_tokens=2048)
        ops = steady_step(step_shape(SETTINGS, workload, unified=False))
        op = next(op for op in ops if op.kind is kind and op.role is Role.EMBEDDING)
        return Costs(PROFILE, workload, SETTINGS).of(op).seconds

    forward, backward = (
        seconds(media, kind) - seconds(None, kind) for kind in (OpKind.FORWARD, OpKind.BACKWARD)
    )
    width = SMALL.hidden
    assert forward == pytest.approx(4 * 1e15 / PROFILE.forward_rate(width, 256))
    assert backward == pytest.approx(forward + 4 * 2e15 / PROFILE.backward_rate(width, 256))
