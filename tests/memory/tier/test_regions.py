"""TierRegions of the scratch file: all bytes of a block's tiered kinds, apart and on pages."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megatrain.memory.arena import aligned_buffer
from megatrain.memory.kinds import TensorKind, kinds_on_disk, store_kinds
from megatrain.memory.layout import PAGE, Layout, build_layout
from megatrain.memory.tier.scratch_file import TierRegions
from megatrain.models.build import build_decoder
from megatrain.optim.states import STATES, WITH_CLIP
from testkit.families import tiny_config


def _layout(state: str = "fp32") -> Layout:
    decoder = build_decoder(tiny_config("ernie4_5_moe"), "bf16", frozen=("*.1.*",))
    return build_layout(decoder.blocks, store_kinds(STATES["adamw"][state], waits=True))


def _regions(layout: Layout) -> TierRegions:
    return TierRegions(layout, kinds_on_disk(layout.kinds, "states"))


def test_what_a_tier_keeps_on_disk() -> None:
    assert [*map(str, kinds_on_disk(WITH_CLIP, "states"))] == ["lo", "m", "v"]
    assert kinds_on_disk(WITH_CLIP, "none") == ()


@pytest.mark.parametrize("state", STATES["adamw"])
def test_parts_are_apart_and_on_pages(state: str) -> None:
    layout = _layout(state)
    regions = _regions(layout)
    spans = []
    for block in range(layout.num_blocks):
        for kind in regions.kinds:
            part, held = regions.part(block, kind), layout.block_extents[block, kind].num_bytes
            assert part.start % PAGE == part.stop % PAGE == 0
            assert 0 <= part.num_bytes - held < PAGE
            assert part.stop <= regions.region_bytes(block)
            spans.append((regions.start(block) + part.start, regions.start(block) + part.stop))
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    assert (
        regions.num_bytes
        == spans[-1][1]
        == sum(
            regions.part(b, k).num_bytes
            for b, k in [
                (block, kind) for block in range(layout.num_blocks) for kind in regions.kinds
            ]
        )
    )


def test_numbers_in_a_region_have_the_order_of_the_arena() -> None:
    layout = _layout("8bit")
    regions = _regions(layout)
    for place in layout.places.values():
        block = place.segment.block
        region = aligned_buffer(regions.region_bytes(block))
        for kind in filter(place.has, regions.kinds):
            extent, part = regions.numbers(place, kind), regions.part(block, kind)
            origin = layout.block_extents[block, kind].start
            assert extent.start - part.start == place.extent(kind).start - origin
            region[extent.start : extent.stop] = 1
            whole = regions.numbers(place.segment, kind)
            assert region[whole.start : whole.stop].sum() == extent.num_bytes
            assert torch.equal(regions.parts(block, region)[kind], region[part.start : part.stop])
            region[extent.start : extent.stop] = 0


def test_a_block_without_trained_params_has_an_empty_region() -> None:
    decoder = build_decoder(tiny_config("llama"), "bf16", frozen=("*.layers.1.*",))
    regions = _regions(build_layout(decoder.blocks, WITH_CLIP))
    assert regions.region_bytes(2) == 0
    assert regions.parts(2, aligned_buffer(0), [TensorKind.LO])[TensorKind.LO].numel() == 0
