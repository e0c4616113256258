"""Checkpoints of a store with a disk tier: the same files, saved and restored through it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatrain import HostModel
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.parts import Parts, checkpoint_parts
from megatrain.disk.checkpoint.restore import restore
from megatrain.disk.checkpoint.save import write_checkpoint
from megatrain.disk.hf.model import read_model_folder
from megatrain.disk.hf.weights_file import WeightsFile, state_tensor
from megatrain.engine.snapshot import Gate, Snapshot
from megatrain.errors import CheckpointCorrupted, DiskError, ScratchFileCorrupted
from megatrain.memory.arena import aligned_buffer
from megatrain.memory.host import resident_bytes
from megatrain.memory.kinds import TensorKind, kinds_on_disk, store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.store import open_store
from megatrain.memory.tier import scratch_file
from megatrain.memory.tier.scratch_file import Scratch
from megatrain.models.decoder import Block, Param
from megatrain.optim.states import STATES, WITH_CLIP, M, V
from megatrain.planning.memory.predicted import SAVE_BYTES, TIER_SAVE_BYTES
from megatrain.step.ops import Role
from testkit.faulty_os import READS, faulty
from tests.disk.checkpoint.saving import tiny_model

EIO = 5


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_file, "TIER_CHUNK_BYTES", 8192)


@pytest.fixture(params=["fp32", "8bit"])
def homes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[HostModel, HostModel]]:
    """A model in memory and the same one with a tier, both with random numbers."""
    kinds = store_kinds(STATES["adamw"][request.param], waits=True)
    tiny_model(tmp_path / "model")
    folder = read_model_folder(tmp_path / "model", frozen=("*.layers.1.*",))
    scratch = Scratch(folder=tmp_path, kinds=kinds_on_disk(kinds, "states"))
    in_memory, tiered = folder.load(kinds), folder.load(kinds, scratch)
    generator = torch.Generator().manual_seed(0)
    for kind in kinds:
        arena = in_memory.store.arena(kind)
        arena.copy_(torch.randint(0, 256, arena.shape, dtype=torch.uint8, generator=generator))
    _copy(in_memory, tiered)
    yield in_memory, tiered
    tiered.store.close()


def _copy(source: HostModel, target: HostModel) -> None:
    tier = target.store.tier
    assert tier is not None
    target.store.arena(TensorKind.HI).copy_(source.store.arena(TensorKind.HI))
    for block in range(len(source.decoder.blocks)):
        region = aligned_buffer(tier.regions.region_bytes(block))
        parts = tier.regions.parts(block, region)
        for kind in target.store.on_disk:
            found = source.store.block_bytes(block, kind)
            parts[kind][: len(found)] = found
        tier.write(block, parts)


def _differences(one: HostModel, other: HostModel) -> list[str]:
    return [
        f"{kind} of {name}"
        for name, place in one.store.layout.places.items()
        for kind in one.store.kinds
        if place.has(kind) and kind is not TensorKind.GRAD
        if not torch.equal(
            one.store.at_rest(name, kind).view(torch.uint8),
            other.store.at_rest(name, kind).view(torch.uint8),
        )
    ]


def _saved(home: HostModel, parent: Path) -> Path:
    blocks = range(len(home.decoder.blocks))
    snapshot = Snapshot(Gate(blocks), blocks, 3, dict.fromkeys(blocks, 0))
    return write_checkpoint(parent, checkpoint_parts(home), snapshot, {})


def test_a_tier_saves_the_files_that_memory_saves(
    homes: tuple[HostModel, HostModel], tmp_path: Path
) -> None:
    one, other = (_saved(home, tmp_path / "checkpoints") for home in homes)
    assert read_manifest(one).files == read_manifest(other).files


def test_checkpoints_go_between_memory_and_tier(
    homes: tuple[HostModel, HostModel], tmp_path: Path
) -> None:
    in_memory, tiered = homes
    checkpoint = _saved(in_memory, tmp_path / "checkpoints")
    other = _saved(tiered, tmp_path / "checkpoints")
    for kind in in_memory.store.kinds:
        in_memory.store.arena(kind).fill_(0xAB)
    assert _differences(in_memory, tiered)
    restore(other, read_manifest(other), checkpoint_parts(in_memory))
    assert _differences(in_memory, tiered) == []
    for block in range(len(tiered.decoder.blocks)):
        with tiered.store.changing(block, TensorKind.LO) as region:
            assert region is not None
            region.fill_(0xAB)
    assert _differences(in_memory, tiered)
    restore(checkpoint, read_manifest(checkpoint), checkpoint_parts(tiered))
    assert _differences(in_memory, tiered) == []


def test_a_damaged_checkpoint_is_found_and_another_fills_the_tier(
    homes: tuple[HostModel, HostModel], tmp_path: Path
) -> None:
    in_memory, tiered = homes
    good, bad = (_saved(in_memory, tmp_path / "checkpoints") for _ in range(2))
    path = bad / "state" / "block-00003.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupted, match="block-00003"):
        restore(bad, read_manifest(bad), checkpoint_parts(tiered))
    restore(good, read_manifest(good), checkpoint_parts(tiered))
    assert _differences(in_memory, tiered) == []


def test_a_save_that_cannot_read_the_tier_leaves_nothing(
    homes: tuple[HostModel, HostModel], tmp_path: Path
) -> None:
    _, tiered = homes
    kept = _saved(tiered, tmp_path / "checkpoints")
    with faulty(counted=READS, fail_at=60, error=EIO), pytest.raises(DiskError, match="last check"):
        _saved(tiered, tmp_path / "checkpoints")
    tier = tiered.store.tier
    assert tier is not None
    key = next(iter(tier._digests))
    tier._digests[key] = "0" * 32
    with pytest.raises(ScratchFileCorrupted):
        _saved(tiered, tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints").iterdir()) == [kept]


def test_a_model_exports_its_masters_from_the_tier(
    homes: tuple[HostModel, HostModel], tmp_path: Path
) -> None:
    for home, name in zip(homes, ("one", "other"), strict=True):
        home.export(tmp_path / name, masters=True)
    names = sorted(path.name for path in (tmp_path / "one").glob("*.safetensors"))
    assert names
    for name in names:
        same = (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
        assert same, name


def test_a_save_holds_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_file, "TIER_CHUNK_BYTES", 4 << 20)
    param = Param(name="w", shape=(24 << 20,), dtype=torch.bfloat16)
    layout = build_layout([Block(index=0, role=Role.LAYER, params=(param,))], WITH_CLIP)
    store = open_store(layout, Scratch(folder=tmp_path, kinds=(TensorKind.LO, M, V)))
    assert store.tier is not None
    state = [state_tensor(store, "w", kind) for kind in (M, V, TensorKind.LO)]
    file = WeightsFile(name="state/block-00000.safetensors", tensors=state)
    parts = Parts(blocks=[[file]], small={}, model="one block", store=store)
    most, before = 0, resident_bytes()

    def note(num_bytes: int) -> None:
        nonlocal most
        most = max(most, resident_bytes() - before)

    snapshot = Snapshot(Gate([0]), [0], 1, {0: 0})
    write_checkpoint(tmp_path / "checkpoints", parts, snapshot, {}, note)
    assert 0 < most < SAVE_BYTES + TIER_SAVE_BYTES < store.tier.regions.num_bytes / 1.5
    store.close()
