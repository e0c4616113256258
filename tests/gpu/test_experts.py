"""Experts on a device without a kernel for their products: the CPU's bits, and few waits."""

from __future__ import annotations

import pytest
from torch import Tensor

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.engine.machine import waits_for_experts
from megatrain.models import experts
from testkit.worlds import Case, make_batch, world_of
from tests.gpu.rigs import Rig

SORT = "mixtral"
LAYERS, SHAPES = 2, ((1, 6), (2, 5))


def test_a_layer_of_experts_waits_once_in_a_forward(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(SORT)
    case = Case(sort=SORT, steps=(), update="late")
    batch = make_batch(SHAPES, seed=0)
    with world.engine(case) as engine:
        expected = engine.step(batch).loss
    weights = world.bytes_of(*world.store.kinds)
    asked: list[int] = []
    ask = experts.ask_device

    def counted(offsets: Tensor) -> list[int]:
        asked.append(1)
        accelerator.synchronize()  # a list of a tensor waits by itself, but not on a simulation
        return ask(offsets)

    monkeypatch.setattr(experts, "ask_device", counted)
    monkeypatch.setattr(AcceleratorDevice, "groups", lambda device, dtype: False)
    with rig.running(world.store, seed=1) as accelerator:
        assert waits_for_experts(world.decoder, accelerator, compiles=False)
        with world.engine(case, device=accelerator) as engine:
            assert engine.step(batch).loss == expected
    assert len(asked) == 2 * LAYERS * len(SHAPES), "in forward and in recompute"
    found = world.bytes_of(*world.store.kinds)
    assert all(found[name].equal(value) for name, value in weights.items())
