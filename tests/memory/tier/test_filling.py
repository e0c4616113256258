"""Filling a tier: pieces in any order, on any thread, become the bytes of the scratch file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.memory.tier import scratch_file
from megatrain.memory.tier.filling import TierFilling
from megatrain.memory.tier.scratch_file import Scratch, Tier
from megatrain.models.decoder import Block, Param
from megatrain.optim.states import ADAMW_8BIT
from megatrain.step.ops import Role

KINDS = (TensorKind.LO, *ADAMW_8BIT)
BLOCKS = [
    Block(
        index=index,
        role=Role.LAYER,
        params=tuple(
            Param(name=f"{index}.{number}", shape=(size,), dtype=torch.bfloat16)
            for number, size in enumerate([5000, 1, 257, 20_000])
        ),
    )
    for index in range(2)
]
LAYOUT = build_layout(BLOCKS, (TensorKind.HI, *KINDS))
CHUNK = 8192


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    monkeypatch.setattr(scratch_file, "TIER_CHUNK_BYTES", CHUNK)
    tier = Scratch(folder=tmp_path, kinds=KINDS).open(LAYOUT)
    yield tier
    tier.close()


def _pieces(size: int) -> Iterator[tuple[str, TensorKind, int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for name, place in LAYOUT.places.items():
        for kind in KINDS:
            data = torch.randint(
                0, 256, (place.extent(kind).num_bytes,), dtype=torch.uint8, generator=generator
            )
            for start in range(0, len(data), size):
                yield name, kind, start, data[start : start + size]


def _differences(tier: Tier) -> list[str]:
    store = Store(LAYOUT, tier)
    expected: dict[tuple[str, TensorKind], list[torch.Tensor]] = {}
    for name, kind, _, data in _pieces(1 << 20):
        expected.setdefault((name, kind), []).append(data)
    return [
        f"{kind} of {name}"
        for (name, kind), data in expected.items()
        if not torch.equal(store.at_rest(name, kind).view(torch.uint8), torch.cat(data))
    ]


@pytest.mark.parametrize("size", [1000, 4096, 100_000])
@pytest.mark.parametrize("order", ["in order", "shuffled", "threads"])
def test_the_tier_has_what_was_put(tier: Tier, size: int, order: str) -> None:
    pieces = list(_pieces(size))
    if order == "shuffled":
        random.Random(size).shuffle(pieces)
    with TierFilling(LAYOUT, tier) as filling:
        if order == "threads":
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda piece: filling.put(*piece), pieces))
        else:
            for piece in pieces:
                filling.put(*piece)
    assert _differences(tier) == []


def test_what_never_came_is_zero(tier: Tier) -> None:
    with TierFilling(LAYOUT, tier) as filling:
        filling.put("1.2", TensorKind.LO, 6, torch.full((4,), 7, dtype=torch.uint8))
    found = Store(LAYOUT, tier).at_rest("1.2", TensorKind.LO).view(torch.uint8)
    assert found.nonzero().view(-1).tolist() == [6, 7, 8, 9]
    assert not Store(LAYOUT, tier).at_rest("1.3", TensorKind.LO).any()


def test_few_chunks_are_held_of_pieces_in_order(tier: Tier) -> None:
    held = []
    with TierFilling(LAYOUT, tier) as filling:
        for piece in _pieces(1000):
            filling.put(*piece)
            held.append(len(filling._open))
    assert max(held) <= len(KINDS)
    assert not filling._open


def test_after_a_failure_nothing_more_is_written(tier: Tier) -> None:
    def fail_half_way() -> None:
        with TierFilling(LAYOUT, tier) as filling:
            filling.put("0.0", TensorKind.LO, 0, torch.ones(10, dtype=torch.uint8))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_half_way()
    assert not Store(LAYOUT, tier).at_rest("0.0", TensorKind.LO).any()
