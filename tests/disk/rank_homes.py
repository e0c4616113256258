"""One model shared by ranks, as stores of one process, and what they have of it together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain import HostModel
from megatrain.disk.checkpoint import checked_read, manifest, masters
from megatrain.disk.hf.model import ModelFolder
from megatrain.memory import direct
from megatrain.memory.arena import aligned_buffer
from megatrain.memory.kinds import TensorKind
from megatrain.memory.tier.scratch_file import Scratch
from megatrain.ranks.ownership import Owner
from testkit.families import save_tiny

SHARED = ("ernie4_5_moe", "deepseek_v3", "llama")
"""Tied, with experts and fp32 params; with experts and buffers; neither."""


def small(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save a model of few elements, so that some ranks have nothing of some segments."""
    return save_tiny(folder, family, dtype, num_hidden_layers=2)


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash files in chunks that are smaller than tensors."""
    for module in (direct, manifest, checked_read, masters):
        monkeypatch.setattr(module, "CHUNK_BYTES", 16384)


def shared_by(
    folder: ModelFolder, kinds: tuple[TensorKind, ...], size: int, scratch: Scratch | None = None
) -> list[HostModel]:
    """Return what each of `size` ranks loads."""
    return [folder.load(kinds, scratch, Owner(rank, size)) for rank in range(size)]


def joined(homes: list[HostModel], name: str, kind: TensorKind) -> Tensor:
    """Return the bytes of a param, from all ranks."""
    parts = [home.store.at_rest(name, kind).reshape(-1) for home in homes]
    return torch.cat(parts).view(torch.uint8)


def differences(homes: list[HostModel], alone: HostModel) -> list[str]:
    """Return what ranks have otherwise than a process alone."""
    return [
        f"{kind} of {name}"
        for name, place in alone.store.layout.places.items()
        for kind in alone.store.kinds
        if place.has(kind) and kind is not TensorKind.GRAD
        if not torch.equal(joined(homes, name, kind), joined([alone], name, kind))
    ]


def fill_at_random(alone: HostModel, homes: list[HostModel]) -> None:
    """Give the store of one process random bytes, and those of ranks their parts of them."""
    generator = torch.Generator().manual_seed(0)
    for kind in alone.store.kinds:
        arena = alone.store.arena(kind)
        arena.copy_(torch.randint(0, 256, arena.shape, dtype=torch.uint8, generator=generator))
    for home in homes:
        for block in range(home.store.layout.num_blocks):
            _fill_block(alone, home, block)


def _fill_block(alone: HostModel, home: HostModel, block: int) -> None:
    store, region = home.store, None
    if store.tier is not None:
        region = aligned_buffer(store.tier.regions.region_bytes(block))
    for place in store.layout.block_places(block):
        for kind in filter(place.has, store.kinds if place.owned else ()):
            whole = alone.store.param(place.param.name, kind).view(-1)
            shared = kind.elements_per_number
            owned = slice(place.owned.start // shared, -(-place.owned.stop // shared))
            where = region if kind in store.on_disk else None
            store.param(place.param.name, kind, where).view(-1)[:] = whole[owned]
    if store.tier is not None and region is not None:
        store.tier.write(block, store.tier.regions.parts(block, region))
