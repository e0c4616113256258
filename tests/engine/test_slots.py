"""Laws of slots.py: views that are the block's params, in memory that was there before."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from megatrain.engine.slots import Slots
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder, build_decoder
from megatrain.optim.states import WITH_CLIP
from testkit.families import tiny_config

FAMILIES = ["llama", "ernie4_5_moe", "gemma"]


@functools.cache
def decoder_of(family: str) -> Decoder:
    """A table larger than any layer; unequal layers with parts in fp32; frozen parts."""
    changes = {"vocab_size": 4096} if family == "llama" else {}
    frozen = ("*norm*",) if family == "gemma" else ()
    return build_decoder(tiny_config(family, **changes), "bf16", frozen)


class World:
    def __init__(self, family: str) -> None:
        self.decoder = decoder_of(family)
        self.layout = build_layout(self.decoder.blocks, WITH_CLIP)
        self.store = Store(self.layout)
        generator = torch.Generator().manual_seed(0)
        for param in self.decoder.params:
            weight = self.store.param(param.name, Kind.HI)
            weight.copy_(torch.randn(param.shape, generator=generator))
        self.sizes: list[int] = []
        self.slots = Slots(self.layout, 2, self.allocate)

    def allocate(self, num_bytes: int) -> Tensor:
        self.sizes.append(num_bytes)
        return torch.full((num_bytes,), 0xAA, dtype=torch.uint8)

    def fetch(self, slot: int | str, block: int) -> None:
        self.slots.buffer(slot, block).copy_(self.store.block_bytes(block, Kind.HI))

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
        views = world.slots.weights(slot, block)
        assert list(views) == [place.param.name for place in world.layout.block_places(block)]
        assert set(views) == {param.name for param in world.decoder.blocks[block].params}
        for name, view in views.items():
            stored = world.store.param(name, Kind.HI)
            assert (view.shape, view.dtype) == (stored.shape, stored.dtype)
            assert torch.equal(view, stored), name


def test_views_of_another_block_would_be_noticed(world: World) -> None:
    world.fetch(1, 1)
    wrong = world.slots.weights(1, 3)  # filled by block 1, asked for block 3
    assert any(not torch.equal(w, world.store.param(n, Kind.HI)) for n, w in wrong.items())


def test_views_are_the_slots_memory_and_follow_its_next_visitor(world: World) -> None:
    world.fetch(1, 1)
    name, view = next(iter(world.slots.weights(1, 1).items()))
    buffer = world.slots.buffer(1, 1)
    start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    assert start <= view.data_ptr() < end
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
            world.slots.weights(slot, block)
    assert len(world.sizes) == num_allocated


def test_slots_are_as_large_as_the_largest_visitor_and_no_larger(world: World) -> None:
    sizes = [
        world.layout.block_extents[block, Kind.HI].num_bytes
        for block in range(world.layout.num_blocks)
    ]
    assert sorted(world.sizes) == sorted([max(sizes[1:-1])] * 2 + [sizes[0], sizes[-1]])
    for slot, block in world.visits():
        assert world.slots.buffer(slot, block).nbytes == sizes[block]


def test_a_fetch_leaves_other_slots_alone(world: World) -> None:
    for slot, block in world.visits():
        world.fetch(slot, block)
    others = world.slots.weights("embedding", 0)
    before = {name: view.clone() for name, view in others.items()}
    world.fetch(0, 2)
    world.fetch(1, 1)
    assert all(torch.equal(view, before[name]) for name, view in others.items())
