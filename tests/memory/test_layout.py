"""Every param has its bytes, apart from every other's, in every kind."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import pytest
import torch

from megatrain.memory.kinds import TensorKind, store_kinds
from megatrain.memory.layout import (
    ALIGN,
    PAGE,
    Layout,
    build_layout,
    has_kind,
    kind_dtype,
    overlap,
)
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Block, Param
from megatrain.optim.states import MUON_8BIT, WITH_CLIP
from megatrain.step.ops import Role
from testkit.families import FAMILIES, tiny_config

WITH_MUON = store_kinds(MUON_8BIT, waits=True)


def _overlaps(layout: Layout) -> list[str]:
    """Return the params that share a byte with the one before them, in any kind."""
    found = []
    for kind in layout.kinds:
        places = [place for place in layout.places.values() if place.has(kind)]
        places.sort(key=lambda place: place.extent(kind).start)
        for left, right in pairwise(places):
            if right.extent(kind).start < left.extent(kind).stop:
                found.append(right.param.name)
    return found


@pytest.mark.parametrize("kinds", [WITH_CLIP, WITH_MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("family", FAMILIES[::10])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_params_never_overlap_and_are_aligned(
    family: str, dtype: Literal["bf16", "fp32"], kinds: tuple[TensorKind, ...]
) -> None:
    decoder = build_decoder(tiny_config(family), dtype, frozen=("*.0.*",))
    layout = build_layout(decoder.blocks, kinds)
    assert _overlaps(layout) == []
    for place in layout.places.values():
        assert place.start % ALIGN == 0
        for kind in kinds:
            has = has_kind(
                kind,
                place.param.dtype,
                trained=place.param.trained,
                matrices=place.segment.matrices,
            )
            assert place.has(kind) == has
            if place.has(kind):
                block = layout.block_extents[place.segment.block, kind]
                extent = place.extent(kind)
                assert block.start <= extent.start <= extent.stop <= block.stop
                assert extent.stop <= layout.kind_bytes[kind]
    for (_, kind), extent in layout.block_extents.items():
        assert extent.start % PAGE == 0
        assert extent.stop <= layout.kind_bytes[kind]


def _bytes_per_param(dtype: torch.dtype, trained: bool = True) -> dict[TensorKind, float]:
    param = Param(name="w", shape=(1 << 20,), dtype=dtype, trained=trained)
    layout = build_layout([Block(index=0, role=Role.LAYER, params=(param,))], WITH_CLIP)
    return {kind: size / layout.num_params for kind, size in layout.kind_bytes.items()}


def test_bytes_per_param() -> None:
    bf16 = _bytes_per_param(torch.bfloat16)
    assert [bf16[kind] for kind in WITH_CLIP] == [2, 2, 4, 4, 2]
    assert [_bytes_per_param(torch.float32)[kind] for kind in WITH_CLIP] == [4, 0, 4, 4, 4]
    assert [_bytes_per_param(torch.bfloat16, trained=False)[kind] for kind in WITH_CLIP] == [
        2,
        0,
        0,
        0,
        0,
    ]


def test_a_segment_is_addressed_alike_in_every_kind() -> None:
    layout = build_layout(build_decoder(tiny_config("ernie4_5_moe"), "bf16").blocks, WITH_CLIP)
    for place in layout.places.values():
        for kind in place.segment.starts:
            size = kind_dtype(kind, place.param.dtype).itemsize
            assert place.extent(kind).start == place.segment.starts[kind] + place.start * size


def test_arenas_of_hundreds_of_gib_are_described_without_memory() -> None:
    config = tiny_config(
        "llama", hidden_size=16384, intermediate_size=53248, num_hidden_layers=126,
        vocab_size=128256, num_attention_heads=128, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    layout = build_layout(build_decoder(config, "bf16").blocks, WITH_CLIP)
    assert 400e9 < layout.num_params < 410e9
    total = sum(layout.kind_bytes.values())
    assert total / layout.num_params == pytest.approx(14, rel=1e-4)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (range(10), range(3, 5), range(3, 5)),
        (range(3, 5), range(10), range(3, 5)),
        (range(4), range(2, 8), range(2, 4)),
        (range(4), range(6, 8), range(4, 4)),
        (range(6, 8), range(4), range(6, 6)),
    ],
)
def test_what_two_ranges_have_in_common(one: range, other: range, common: range) -> None:
    assert overlap(one, other) == common
