"""Device memory of the engine: bounded by the plan, whatever the depth of the model.

Copying mode, tape on the host. Twice: as the device's own meter counts, and by a second count
that watches every tensor that torch makes.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor
from transformers import LlamaConfig

from megatrain.devices.device import CpuDevice
from megatrain.errors import OutOfDeviceMemory
from megatrain.memory.arena import map_arena
from megatrain.memory.kinds import TensorKind
from testkit.live_bytes import LiveBytes
from testkit.worlds import SIZES, Case, Sort, World, dawdling_lanes, make_batch

DEPTHS = (8, 64)
SHAPES = ((1, 6), (2, 8))
CASE = Case(sort="", steps=(SHAPES,) * 2, update="late", tape="host", copying=True)


@functools.cache
def world_of(num_layers: int) -> World:
    config = functools.partial(
        LlamaConfig, **SIZES, num_hidden_layers=num_layers, tie_word_embeddings=False
    )
    return World(Sort(config=config))


def peak_bytes(num_layers: int, cap_bytes: int | None = None, **changes: Any) -> int:
    """Return the meter's peak over two steps and an evaluation."""
    device = CpuDevice(copying=True, cap_bytes=cap_bytes)
    with world_of(num_layers).engine(CASE, device=device, **changes) as engine:
        for number, shapes in enumerate(CASE.steps):
            engine.step(make_batch(shapes, seed=number))
        engine.evaluate(make_batch(SHAPES, seed=0))
    return device.meter.peak_bytes


@pytest.mark.merge
@pytest.mark.parametrize("reference", [True, False])
def test_the_peak_does_not_grow_with_depth(reference: bool) -> None:
    shallow, deep = (peak_bytes(depth, reference=reference) for depth in DEPTHS)
    assert deep == pytest.approx(shallow, rel=0.02)


def test_it_runs_under_a_cap_of_its_own_peak_and_not_below() -> None:
    peak = peak_bytes(8, reference=True)
    assert peak_bytes(24, cap_bytes=peak, reference=True) == peak
    with pytest.raises(
        OutOfDeviceMemory, match=r"^device memory: .*hidden states needs .* of .* are free$"
    ):
        peak_bytes(24, cap_bytes=peak - 1, reference=True)
    with pytest.raises(OutOfDeviceMemory, match=r"^device memory: weight slots needs "):
        peak_bytes(24, cap_bytes=1000, reference=True)


def test_a_batch_that_does_not_fit_touches_nothing_and_a_smaller_one_goes_on() -> None:
    device = CpuDevice(copying=True, cap_bytes=peak_bytes(8, reference=True, tape="device"))
    with world_of(8).engine(CASE, device=device, reference=True, tape="device") as engine:
        first = engine.step(make_batch(SHAPES, seed=0))
        with pytest.raises(OutOfDeviceMemory, match=r"^device memory: tape needs .* are free$"):
            engine.step(make_batch(((16, 32),), seed=1))
        assert not engine.weights_inconsistent
        second = engine.step(make_batch(SHAPES, seed=1))
    with world_of(8).engine(CASE, reference=True, tape="device") as engine:
        assert engine.step(make_batch(SHAPES, seed=0)) == first
        assert engine.step(make_batch(SHAPES, seed=1)) == second


def largest_possible(grad_slots: int) -> int:
    """Return what the plan allows: slots, the ring, and two hidden states of each micro-batch."""
    world = world_of(24)
    layout, blocks = world.store.layout, range(26)
    weights = [layout.block_extents[block, TensorKind.HI].num_bytes for block in blocks]
    gradients = [4 * sum(s.num_elements for s in layout.trained_segments(b)) for b in blocks]
    hidden = [2 * rows * length * 32 for rows, length in SHAPES]  # bf16, 32 wide
    ring = 2 * max(hidden)
    return (
        2 * weights[1] + weights[0] + weights[-1]
        + grad_slots * gradients[1] + max(gradients[0], gradients[-1])
        + ring + sum(hidden) + 2 * max(hidden)
    )  # fmt: skip


@pytest.mark.few(2)
@pytest.mark.parametrize("timing", range(4))
def test_no_timing_of_the_lanes_exceeds_the_plan(timing: int) -> None:
    grad_slots = 1 + timing % 2
    limit = largest_possible(grad_slots)
    lanes = dawdling_lanes(timing)
    peak = peak_bytes(24, cap_bytes=limit, lanes=lanes, grad_slots=grad_slots)
    assert 0.9 * limit < peak <= limit


def test_one_gradient_slot_is_one_layer_less() -> None:
    one, two = (peak_bytes(8, reference=True, grad_slots=count) for count in (1, 2))
    assert two - one == largest_possible(2) - largest_possible(1) > 0


# The second count.


class Apart(CpuDevice):
    """Host memory comes from the system, where the count does not see it, and not from torch."""

    def map_host(self, num_bytes: int, purpose: str) -> Tensor:
        return map_arena(purpose, num_bytes)


def counted_peak(num_layers: int, **changes: Any) -> int:
    world = world_of(num_layers)
    batches = [make_batch(shapes, seed=number) for number, shapes in enumerate(CASE.steps)]
    count = LiveBytes()
    device = Apart(copying=True)
    with world.engine(CASE, device=device, reference=True, **changes) as engine, count:
        for batch in batches:
            engine.step(batch)
    return count.peak


@pytest.mark.merge
def test_a_second_count_does_not_grow_with_depth_either() -> None:
    shallow, deep = map(counted_peak, DEPTHS)
    assert shallow > 10_000
    assert deep == pytest.approx(shallow, rel=0.02)
