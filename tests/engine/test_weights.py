"""Laws of weights.py: views that are the params of a block, in memory that was there before."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from megatrain.devices.device import CpuDevice
from megatrain.engine.weights import Slots, Weights
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.optim.states import WITH_CLIP
from megatrain.step.ops import OpKind
from megatrain.step.shape import StepShape
from testkit.families import tiny_config
from testkit.schedules import op_of
from testkit.worlds import world_of

FAMILIES = ["llama", "ernie4_5_moe", "gemma"]


@functools.cache
def decoder_of(family: str) -> Decoder:
    """A table larger than any layer; unequal layers with parts in fp32; frozen parts."""
    changes = {"vocab_size": 4096} if family == "llama" else {}
    frozen = ("*norm*",) if family == "gemma" else ()
    return build_decoder(tiny_config(family, **changes), "bf16", frozen)


class UsedMemory(CpuDevice):
    """A device that notes what is allocated, and whose memory is full of something else."""

    def __init__(self) -> None:
        super().__init__(copying=True)
        self.sizes: list[int] = []

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        self.sizes.append(num_bytes)
        return super().allocate(num_bytes, purpose).fill_(0xAA)


class World:
    def __init__(self, family: str) -> None:
        self.decoder = decoder_of(family)
        self.layout = build_layout(self.decoder.blocks, WITH_CLIP)
        self.store = Store(self.layout)
        generator = torch.Generator().manual_seed(0)
        for param in self.decoder.params:
            weight = self.store.param(param.name, TensorKind.HI)
            weight.copy_(torch.randn(param.shape, generator=generator))
        device = UsedMemory()
        self.sizes = device.sizes
        self.slots = Slots(self.store, device, StepShape(num_blocks=self.layout.num_blocks))

    def fetch(self, slot: int | str, block: int) -> None:
        num_bytes = self.slots.fetch(block, slot)
        assert num_bytes == self.layout.block_extents[block, TensorKind.HI].num_bytes

    def visits(self) -> list[tuple[int | str, int]]:
        last = self.layout.num_blocks - 1
        layers = [(block % 2, block) for block in range(1, last)]
        return [("embedding", 0), *layers, ("head", last)]


@pytest.fixture(params=FAMILIES)
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def test_views_are_the_blocks_params_in_their_own_shapes(world: World) -> None:
    for slot, block in world.visits():
        world.fetch(slot, block)
        views = world.slots.weights(block, slot)
        assert list(views) == [place.param.name for place in world.layout.block_places(block)]
        assert set(views) == {param.name for param in world.decoder.blocks[block].params}
        for name, view in views.items():
            stored = world.store.param(name, TensorKind.HI)
            assert (view.shape, view.dtype) == (stored.shape, stored.dtype)
            assert torch.equal(view, stored), name


def test_views_are_the_slots_memory_and_follow_its_next_visitor(world: World) -> None:
    world.fetch(1, 1)
    name, view = next(iter(world.slots.weights(1, 1).items()))
    before = view.clone()
    world.fetch(1, 3)
    assert not torch.equal(view, before)
    world.fetch(1, 1)
    assert world.slots.weights(1, 1)[name] is view
    assert torch.equal(view, before)


def test_nothing_is_allocated_after_construction(world: World) -> None:
    num_allocated = len(world.sizes)
    for _ in range(2):
        for slot, block in world.visits():
            world.fetch(slot, block)
            world.slots.weights(block, slot)
    assert len(world.sizes) == num_allocated


def test_slots_are_as_large_as_the_largest_visitor_and_no_larger(world: World) -> None:
    sizes = [
        world.layout.block_extents[block, TensorKind.HI].num_bytes
        for block in range(world.layout.num_blocks)
    ]
    assert sorted(world.sizes) == sorted([max(sizes[1:-1])] * 2 + [sizes[0], sizes[-1]])


def test_a_fetch_leaves_other_slots_alone(world: World) -> None:
    for slot, block in world.visits():
        world.fetch(slot, block)
    others = world.slots.weights(0, "embedding")
    before = {name: view.clone() for name, view in others.items()}
    world.fetch(0, 2)
    world.fetch(1, 1)
    assert all(torch.equal(view, before[name]) for name, view in others.items())


def weights_of(sort: str, device: CpuDevice) -> tuple[Weights, StepShape]:
    world = world_of(sort)
    shape = StepShape(
        num_blocks=len(world.decoder.blocks), copying=device.copying, tied=world.decoder.tied
    )
    return Weights(world.decoder, world.store, device, shape, None), shape


def test_with_unified_memory_compute_reads_the_store_itself() -> None:
    world, device = world_of("llama of 2 layers"), CpuDevice()
    weights, shape = weights_of("llama of 2 layers", device)
    for block in world.decoder.blocks[:-1]:
        found = weights.of(op_of(shape, OpKind.FORWARD, block.index))
        assert list(found) == [param.name for param in block.params]
        for name, weight in found.items():
            assert weight.data_ptr() == world.store.param(name, TensorKind.HI).data_ptr()
    assert device.meter.live_bytes == 0


def test_with_copies_compute_reads_slots_and_the_store_is_out_of_reach() -> None:
    weights, shape = weights_of("llama of 2 layers", CpuDevice(copying=True))
    hi = world_of("llama of 2 layers").store.block_bytes(1, TensorKind.HI)
    weights.fetch(op_of(shape, OpKind.FETCH, 1))
    for weight in weights.of(op_of(shape, OpKind.FORWARD, 1)).values():
        assert not hi.data_ptr() <= weight.data_ptr() < hi.data_ptr() + hi.nbytes


@pytest.mark.parametrize("copying", [False, True])
@pytest.mark.parametrize(
    ("sort", "name"),
    [("llama of 2 layers", "lm_head.weight"), ("gemma, tied", "model.embed_tokens.weight")],
)
def test_the_output_projection_is_the_heads_or_the_tables(
    sort: str, name: str, copying: bool
) -> None:
    weights, shape = weights_of(sort, CpuDevice(copying=copying))
    if copying:
        weights.fetch(op_of(shape, OpKind.FETCH, 0))
        weights.fetch(op_of(shape, OpKind.FETCH, shape.head))
    weight, bias = weights.projection(op_of(shape, OpKind.HEAD))
    assert weights.head_weight == name
    assert torch.equal(weight, world_of(sort).store.param(name, TensorKind.HI))
    assert bias is None


def test_only_trained_params_want_a_gradient() -> None:
    weights, shape = weights_of("llama, partly frozen", CpuDevice())
    trained = {
        name: leaf.requires_grad
        for block in (0, 2)
        for name, leaf in weights.leaves(op_of(shape, OpKind.BACKWARD, block)).items()
    }
    assert trained["model.layers.1.self_attn.q_proj.weight"]
    assert not trained["model.layers.1.mlp.up_proj.weight"]
    assert not trained["model.embed_tokens.weight"]
