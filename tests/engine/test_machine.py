"""The machine: all memory that a shape needs is there before the first op."""

from __future__ import annotations

from megatrain.devices.device import CpuDevice
from megatrain.engine.machine import build_machine
from megatrain.memory.kinds import TensorKind
from megatrain.step.settings import StepSettings
from megatrain.step.shape import StepShape
from testkit.worlds import world_of


def test_the_device_is_asked_for_all_of_it_at_once() -> None:
    world, device = world_of("llama of 2 layers"), CpuDevice(copying=True)
    shape = StepShape(num_blocks=4, update="late")
    machine = build_machine(
        world.decoder, world.store, device, shape, world.optimizer(), StepSettings()
    )
    layout = world.store.layout
    weights = [layout.block_extents[block, TensorKind.HI].num_bytes for block in range(4)]
    gradients = [4 * sum(s.num_elements for s in layout.trained_segments(b)) for b in range(4)]
    expected = 2 * weights[1] + weights[0] + weights[3]
    expected += 2 * gradients[1] + max(gradients[0], gradients[3])
    assert device.meter.live_bytes == expected
    del machine
    assert device.meter.live_bytes == 0
