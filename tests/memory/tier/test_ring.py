"""Host buffers between the scratch file and the updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain.memory.kinds import kinds_on_disk
from megatrain.memory.layout import Layout, build_layout
from megatrain.memory.store import Store
from megatrain.memory.tier.ring import TierRing
from megatrain.memory.tier.scratch_file import Tier, TierRegions
from megatrain.models.decoder import Block, Param
from megatrain.optim.states import WITH_CLIP, M
from megatrain.step.ops import Op, OpKind, Resource, Role

STATE: dict[Resource, Resource] = {("optim_state", 1): ("tier_slot", 0)}
READ = Op(kind=OpKind.READ, block=1, writes=(("tier_slot", 0),), places=STATE)
WRITE = replace(READ, kind=OpKind.WRITE)


def layout_of(*sizes: int) -> Layout:
    params = [
        Param(name=f"{number}.weight", shape=(size,), dtype=torch.bfloat16)
        for number, size in enumerate(sizes)
    ]
    blocks = [Block(index=n, role=Role.LAYER, params=(p,)) for n, p in enumerate(params)]
    return build_layout(blocks, WITH_CLIP)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    layout = layout_of(5000, 300, 9000)
    on_disk = kinds_on_disk(WITH_CLIP, "states")
    store = Store(layout, Tier(tmp_path, TierRegions(layout, on_disk)))
    yield store
    store.close()


def test_a_buffer_has_room_for_the_largest_of_its_blocks(store: Store) -> None:
    assert store.tier is not None
    size = store.tier.regions.region_bytes
    assert size(2) > size(0) > size(1)
    assert TierRing(store, {0: "edge", 1: 0, 2: "edge"}).num_bytes == size(2) + size(1)


def test_what_is_written_is_what_is_read(store: Store) -> None:
    ring = TierRing(store, {1: 0})
    assert ring.read(READ) > 0
    region = ring.region(READ)
    assert region is not None
    segment = store.layout.trained_segments(1)[0]
    store.segment(segment, M, region).fill_(3.0)
    assert ring.write(WRITE) > 0
    region.zero_()
    ring.read(READ)
    assert store.segment(segment, M, region).eq(3.0).all()


def test_a_store_without_a_tier_needs_no_buffers() -> None:
    ring = TierRing(Store(layout_of(10, 10)), {})
    assert ring.num_bytes == 0
    assert ring.region(Op(kind=OpKind.UPDATE, block=1, writes=(("optim_state", 1),))) is None
