"""Laws of door.py: where gradients are on the host, and what a drain makes of a sum."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from megatrain.devices.device import CpuDevice
from megatrain.engine.gradients.door import Gradients
from megatrain.features.registry import places_of
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.step.ops import OpKind
from megatrain.step.shape import StepShape
from testkit.families import tiny_config
from testkit.schedules import op_of
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


def gradients_of(world: World, device: CpuDevice, *, update: str = "none") -> Gradients:
    shape = shape_of(world, copying=device.copying, update=update)
    return Gradients(world.store, device, shape, places_of(shape), None, updates=update != "none")


@functools.cache
def mixed_world() -> World:
    world = World(Sort(config=lambda: tiny_config("ernie4_5_moe")))
    assert max(len(world.store.layout.trained_segments(block)) for block in range(5)) == 2
    return world


@pytest.mark.parametrize("update", ["none", "late", "in_backward"])
@pytest.mark.parametrize("sort", ["gemma, tied", "llama, partly frozen", "with parts in fp32"])
def test_gradients_have_the_form_of_their_segments_and_do_not_overlap(
    sort: str, update: str
) -> None:
    world = mixed_world() if sort == "with parts in fp32" else world_of(sort)
    gradients = gradients_of(world, CpuDevice(), update=update)
    shape = shape_of(world, copying=False, update=update)
    for block in shape.trained_blocks:
        found = gradients.flat(op_of(shape, OpKind.DRAIN, block))
        assert [s for s, _ in found] == world.store.layout.trained_segments(block)
        for number, (segment, gradient) in enumerate(found):
            assert (gradient.dtype, gradient.numel()) == (segment.dtype, segment.num_elements)
            gradient.fill_(number + 1)
        for number, (_, gradient) in enumerate(found):
            assert (gradient == number + 1).all()
        in_store = (
            found[0][1].data_ptr() == world.store.segment(found[0][0], TensorKind.GRAD).data_ptr()
        )
        assert in_store == (update != "in_backward")
    world.rewind()


def test_gradients_in_backward_rotate_through_few_buffers() -> None:
    world = world_of("llama of 5 layers")
    gradients = gradients_of(world, CpuDevice(), update="in_backward")
    shape = shape_of(world, copying=False, update="in_backward")
    buffers = {
        gradients.flat(op_of(shape, OpKind.DRAIN, block))[0][1].data_ptr()
        for block in shape.trained_blocks
    }
    assert len(buffers) == 3  # two for the layers, one for embedding and head


@pytest.mark.parametrize("copying", [False, True])
@pytest.mark.parametrize("update", ["late", "in_backward"])
def test_a_drained_gradient_is_the_sum_of_its_parts_rounded_once(
    update: str, copying: bool
) -> None:
    world = world_of("gemma, tied")
    gradients = gradients_of(world, CpuDevice(copying=copying), update=update)
    shape = shape_of(world, copying=copying, update=update)
    name = "model.embed_tokens.weight"
    place = world.store.layout.places[name]
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(place.param.shape, generator=generator) for _ in range(3)]
    gradients.begin(op_of(shape, OpKind.HEAD))
    gradients.add({name: parts[0]})  # by the head, which reads the table too
    for micro, part in enumerate(parts[1:]):
        gradients.begin(op_of(replace(shape, num_micro=2), OpKind.BACKWARD, 0, micro))
        gradients.add({name: part})
    gradients.drain(op_of(shape, OpKind.DRAIN, 0))
    norm = op_of(shape, OpKind.NORM, 0)
    gradients.finish(norm)
    (drained,) = (flat for segment, flat in gradients.flat(norm) if segment is place.segment)
    drained = drained[place.start : place.start + place.param.num_elements]
    total = parts[0] + parts[1] + parts[2]
    assert torch.equal(drained, total.view(-1).to(drained.dtype))
    rounded = sum((part.to(drained.dtype) for part in parts[1:]), parts[0].to(drained.dtype))
    assert not torch.equal(drained, rounded.view(-1)), "a sum of rounded parts would be noticed"
    world.rewind()


@pytest.mark.parametrize("kinds", [(TensorKind.HI,), (TensorKind.HI, TensorKind.GRAD)])
def test_a_model_that_is_only_read_has_no_memory_for_gradients(
    kinds: tuple[TensorKind, ...],
) -> None:
    world, device = world_of("llama of 2 layers"), CpuDevice(copying=True)
    store = Store(build_layout(world.decoder.blocks, kinds))
    shape = shape_of(world)
    gradients = Gradients(store, device, shape, places_of(shape), None, updates=False)
    assert (device.meter.live_bytes > 0) == (TensorKind.GRAD in kinds)
    del gradients
