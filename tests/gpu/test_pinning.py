"""Copies to and from pinned host memory: exact by both ways, and nobody waits for them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.devices.accelerator import AcceleratorDevice
from testkit.states import steps_of
from testkit.worlds import Case, make_batch, world_of
from tests.gpu.rigs import Rig, play

SORT = "llama of 2 layers"
CASE = Case(sort=SORT, steps=steps_of(2)[:2], update="late", tape="host")
SMALL = {"piece_bytes": 4096 * 3, "ring_buffer_bytes": 1000}
"""So that copies are cut, and go around the ring many times."""


@pytest.mark.few(1)
@pytest.mark.parametrize("tape", ["host", pytest.param("device", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("refuses_at", [None, 1])
def test_registered_and_staged_copies_are_exact(
    rig: Rig, refuses_at: int | None, tape: Any
) -> None:
    case = Case(sort=SORT, steps=CASE.steps, update="late", tape=tape)
    world = world_of(SORT)
    with rig.running(world.store) as accelerator:
        expected = play(rig, world, case, accelerator, reference=True)
    with (
        warnings.catch_warnings(record=True) as told,
        rig.running(world.store, seed=1, refuses_at=refuses_at, **SMALL) as accelerator,
    ):
        warnings.simplefilter("always")
        outcome = play(rig, world, case, accelerator)
    assert outcome.differences(expected) == []
    texts = [str(w.message) for w in told if "can be pinned" in str(w.message)]
    assert len(texts) == (0 if refuses_at is None else 1), "told once"


@pytest.mark.merge
def test_a_wrong_copy_would_be_noticed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of each block's copy to the device is left out."""
    world, copy = world_of(SORT), AcceleratorDevice.copy
    with rig.running(world.store) as accelerator:
        expected = play(rig, world, CASE, accelerator, reference=True)

    def short(accelerator: AcceleratorDevice, target: Tensor, source: Tensor) -> None:
        # Not of the inputs, which are small: no embedding has a row of what would be read there.
        cuts = target.dtype is torch.uint8 and target.nbytes > 2048
        less = slice(0, target.numel() - cuts)
        copy(accelerator, target[less], source[less])

    monkeypatch.setattr(AcceleratorDevice, "copy", short)
    with rig.running(world.store, seed=1) as accelerator:
        outcome = play(rig, world, CASE, accelerator)
    assert outcome.differences(expected) != []


def test_small_host_tensors_are_pinned(rig: Rig) -> None:
    world = world_of(SORT)
    with rig.running(world.store) as accelerator:
        ids = torch.arange(12).view(3, 4)[:, 1:]
        pinned = accelerator.pinned(ids)
        assert rig.is_pinned(pinned)
        assert not rig.is_pinned(ids)
        assert torch.equal(pinned, ids)
        placed = accelerator.place(ids)
        assert rig.runtime.is_device(placed)
        with rig.runtime.stream():
            brought = accelerator.to_host(placed + 1)
        accelerator.synchronize()
        assert rig.is_pinned(brought)
        assert torch.equal(brought, ids + 1)


def test_host_memory_that_goes_is_unregistered(rig: Rig) -> None:
    """A tape that grows leaves its old room, whose address may be mapped again."""
    accelerator = rig.bare(piece_bytes=1 << 16)
    registry = accelerator._registry
    for num_bytes in (3 << 16, 5 << 16):
        arena = accelerator.map_host(num_bytes, "tape")
        assert len(registry._starts) == num_bytes >> 16
        assert registry.pieces(arena[100:200]) == [slice(0, 100)]
        accelerator.unmap_host(arena)
        assert registry.pieces(arena[100:200]) is None
        assert registry._starts == []
    accelerator.close()


@pytest.mark.parametrize("tape", ["host", pytest.param("device", marks=pytest.mark.thorough)])
def test_a_steady_step_never_waits_for_the_device(rig: Rig, tape: Any) -> None:
    world = world_of(SORT)
    case = Case(sort=SORT, steps=(), update="late", tape=tape)
    with rig.running(world.store, seed=1) as accelerator:
        optimizer = rig.optimizer(world)
        with world.engine(case, device=accelerator, optimizer=optimizer) as engine:
            engine.step(make_batch(((1, 6), (2, 5)), seed=0))
            with rig.without_waits():
                engine.step(make_batch(((1, 6), (2, 5)), seed=1))
                engine.step(make_batch(((1, 6), (2, 5)), seed=2))
