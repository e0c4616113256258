"""The machine: where ops find weights and gradients, and that it is all there before the first."""

from __future__ import annotations

import functools

import pytest
import torch

from megatrain.devices.device import CpuDevice
from megatrain.engine.machine import Machine
from megatrain.memory.kinds import Kind
from megatrain.step.resources import OpTable
from megatrain.step.shape import StepShape
from testkit.families import tiny_config
from testkit.worlds import Sort, World, world_of


def shape_of(world: World, *, copying: bool = True, update: str = "none") -> StepShape:
    decoder = world.decoder
    return StepShape(
        num_blocks=len(decoder.blocks),
        copying=copying,
        update=update,  # type: ignore[arg-type]
        tied=decoder.tied,
        trained=tuple(any(p.trained for p in block.params) for block in decoder.blocks),
    )


def machine_of(world: World, device: CpuDevice, *, update: str = "none") -> Machine:
    shape = shape_of(world, copying=device.copying, update=update)
    optimizer = None if update == "none" else world.optimizer()
    return Machine(world.decoder, world.store, device, shape, optimizer, chunk_tokens=8, seed=0)


@functools.cache
def mixed_world() -> World:
    world = World(Sort(config=lambda: tiny_config("ernie4_5_moe")))
    assert max(len(world.store.layout.trained_segments(block)) for block in range(5)) == 2
    return world


def test_with_unified_memory_compute_reads_the_store_itself() -> None:
    world = world_of("llama of 2 layers")
    device = CpuDevice(copying=False)
    machine = machine_of(world, device)
    for block in world.decoder.blocks:
        weights = machine.weights(block.index, None)
        assert list(weights) == [param.name for param in block.params]
        for name, weight in weights.items():
            assert weight.data_ptr() == world.store.param(name, Kind.HI).data_ptr()
    assert machine.slots is None


def test_with_copies_compute_reads_slots_and_the_store_is_out_of_reach() -> None:
    world = world_of("llama of 2 layers")
    machine = machine_of(world, CpuDevice(copying=True))
    hi = world.store.block_bytes(1, Kind.HI)
    for weight in machine.weights(1, 0).values():
        assert not hi.data_ptr() <= weight.data_ptr() < hi.data_ptr() + hi.nbytes


@pytest.mark.parametrize("update", ["none", "late", "in_backward"])
@pytest.mark.parametrize("sort", ["gemma, tied", "llama, partly frozen", "with parts in fp32"])
def test_gradients_have_the_form_of_their_segments_and_do_not_overlap(
    sort: str, update: str
) -> None:
    world = mixed_world() if sort == "with parts in fp32" else world_of(sort)
    machine = machine_of(world, CpuDevice(), update=update)
    table = OpTable(shape_of(world, copying=False, update=update))
    for block in table.shape.trained_blocks:
        found = machine.gradients(table.drain(block))
        assert [s for s, _ in found] == world.store.layout.trained_segments(block)
        for number, (segment, gradient) in enumerate(found):
            assert (gradient.dtype, gradient.numel()) == (segment.dtype, segment.num_elements)
            gradient.fill_(number + 1)
        for number, (_, gradient) in enumerate(found):
            assert (gradient == number + 1).all()
        in_store = found[0][1].data_ptr() == world.store.segment(found[0][0], Kind.GRAD).data_ptr()
        assert in_store == (update != "in_backward")
    world.rewind()


def test_gradients_in_backward_rotate_through_few_buffers() -> None:
    world = world_of("llama of 5 layers")
    machine = machine_of(world, CpuDevice(), update="in_backward")
    table = OpTable(shape_of(world, copying=False, update="in_backward"))
    buffers = {
        machine.gradients(table.drain(block))[0][1].data_ptr()
        for block in table.shape.trained_blocks
    }
    assert len(buffers) == 3  # two for the layers, one for embedding and head


def test_the_device_is_asked_for_all_of_it_at_once() -> None:
    world = world_of("llama of 2 layers")
    device = CpuDevice(copying=True)
    machine = machine_of(world, device, update="late")
    layout = world.store.layout
    weights = [layout.block_extents[block, Kind.HI].num_bytes for block in range(4)]
    gradients = [4 * sum(s.num_elements for s in layout.trained_segments(b)) for b in range(4)]
    expected = 2 * weights[1] + weights[0] + weights[3]
    expected += 2 * gradients[1] + max(gradients[0], gradients[3])
    assert device.meter.live_bytes == expected
    del machine
    assert device.meter.live_bytes == 0


@pytest.mark.parametrize(
    ("sort", "weight"),
    [("llama of 2 layers", "lm_head.weight"), ("gemma, tied", "model.embed_tokens.weight")],
)
def test_the_output_projection_is_the_heads_or_the_tables(sort: str, weight: str) -> None:
    assert machine_of(world_of(sort), CpuDevice()).head_weight == weight


def test_frozen_params_are_not_trained() -> None:
    world = world_of("llama, partly frozen")
    trained = machine_of(world, CpuDevice()).trained
    assert "model.layers.1.self_attn.q_proj.weight" in trained
    assert "model.layers.1.mlp.up_proj.weight" not in trained
    assert "model.embed_tokens.weight" not in trained


def test_nothing_has_been_updated_at_first() -> None:
    machine = machine_of(world_of("llama, partly frozen"), CpuDevice(), update="late")
    assert machine.gate.num_updates == {2: 0, 4: 0, 5: 0}
    assert not machine.half_applied
    assert not machine.verdict.applies
    assert torch.equal(torch.tensor(machine.verdict.scale), torch.tensor(1.0))
