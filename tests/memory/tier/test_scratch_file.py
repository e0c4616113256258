"""The disk tier: bytes come back as they went, or as an error with a name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import files
from megatrain.errors import DiskError, DiskFull, ScratchFileCorrupted
from megatrain.memory.arena import aligned_buffer
from megatrain.memory.kinds import TensorKind, kinds_on_disk
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store, store_ledger
from megatrain.memory.tier import scratch_file
from megatrain.memory.tier.scratch_file import Tier, TierRegions
from megatrain.models.decoder import Block, Param
from megatrain.optim.states import WITH_CLIP, M, V
from megatrain.step.ops import Role
from testkit.faulty_os import CHANGES, READS, faulty

ENOSPC, EIO = 28, 5
BLOCKS = [
    Block(
        index=index,
        role=Role.LAYER,
        params=(
            Param(name=f"{index}.w", shape=(300, 7), dtype=torch.bfloat16),
            Param(name=f"{index}.norm", shape=(33,), dtype=torch.float32),
        ),
    )
    for index in range(3)
]
LAYOUT = build_layout(BLOCKS, WITH_CLIP)
REGIONS = TierRegions(LAYOUT, kinds_on_disk(WITH_CLIP, "states"))


@pytest.fixture(params=["direct", "cached"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch_file, "TIER_CHUNK_BYTES", 4096)  # several chunks in a part
    if request.param == "cached":
        monkeypatch.setattr(files, "_O_DIRECT", 0)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    tier = Tier(tmp_path, REGIONS)
    yield tier
    tier.close()


def _random_region(block: int, seed: int = 0) -> torch.Tensor:
    region = aligned_buffer(REGIONS.region_bytes(block))
    generator = torch.Generator().manual_seed(seed + block)
    region.copy_(torch.randint(0, 256, region.shape, dtype=torch.uint8, generator=generator))
    return region


def _read(tier: Tier, block: int) -> torch.Tensor:
    region = aligned_buffer(REGIONS.region_bytes(block)).fill_(0xAB)
    assert tier.read(block, REGIONS.parts(block, region)) == len(region)
    return region


def test_a_block_reads_as_it_was_last_written(tier: Tier) -> None:
    for seed in (0, 10):
        for block in range(3):
            tier.write(block, REGIONS.parts(block, _random_region(block, seed)))
    for block in range(3):
        assert torch.equal(_read(tier, block), _random_region(block, 10))


def test_parts_are_written_and_read_alone(tier: Tier) -> None:
    whole, other = _random_region(1), _random_region(1, 5)
    tier.write(1, REGIONS.parts(1, whole))
    tier.write(1, {V: REGIONS.parts(1, other)[V]})
    found = REGIONS.parts(1, _read(tier, 1))
    for kind, part in REGIONS.parts(1, whole).items():
        assert torch.equal(found[kind], part) == (kind is not V)
    assert torch.equal(found[V], REGIONS.parts(1, other)[V])


def test_what_was_never_written_is_zero_without_a_read(tier: Tier) -> None:
    tier.write(0, REGIONS.parts(0, _random_region(0), [M]))
    with faulty(counted=READS, fail_at=0, error=EIO, persistent=True):
        assert not _read(tier, 2).any()
        region = aligned_buffer(REGIONS.region_bytes(0)).fill_(1)
        tier.read(0, REGIONS.parts(0, region, [V, TensorKind.LO]))
        assert not REGIONS.parts(0, region)[V].any()
        with pytest.raises(DiskError):
            tier.read(0, REGIONS.parts(0, region, [M]))


def test_a_changed_byte_is_an_error_that_names_its_place(tier: Tier) -> None:
    for block in range(3):
        tier.write(block, REGIONS.parts(block, _random_region(block)))
    at = REGIONS.start(1) + REGIONS.part(1, V).start + 4096
    page = aligned_buffer(4096)
    os.preadv(tier._fd, [page.numpy().data], at)
    page[77] ^= 1
    os.pwrite(tier._fd, page.numpy().data, at)
    with pytest.raises(
        ScratchFileCorrupted, match=rf"bytes {at} to .*v of block 1.* last checkpoint is"
    ):
        _read(tier, 1)
    assert torch.equal(_read(tier, 2), _random_region(2))


def test_a_file_that_was_cut_is_an_error(tier: Tier) -> None:
    tier.write(2, REGIONS.parts(2, _random_region(2)))
    os.ftruncate(tier._fd, REGIONS.start(2) + 4096)
    with pytest.raises(DiskError, match=r"ends at byte .* were expected.*last checkpoint"):
        _read(tier, 2)


def _visit(folder: Path) -> None:
    tier = Tier(folder, REGIONS)
    try:
        for block in range(3):
            tier.write(block, REGIONS.parts(block, _random_region(block)))
        for block in range(3):
            _read(tier, block)
    finally:
        tier.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("error", [ENOSPC, EIO])
def test_any_failing_call_is_a_disk_error_and_leaves_nothing(tmp_path: Path, error: int) -> None:
    with faulty(counted=CHANGES | READS) as calls:
        _visit(tmp_path)
    assert {"open", "unlink", "posix_fallocate", "pwrite", "preadv"} <= {n for n, _ in calls.log}
    for number in range(calls.num_calls):
        with (
            faulty(counted=CHANGES | READS, fail_at=number, error=error),
            pytest.raises(DiskFull if error == ENOSPC else DiskError),
        ):
            _visit(tmp_path)
        assert list(tmp_path.iterdir()) == [], calls.log[number]


def test_a_write_that_failed_is_not_read_as_if_it_had_not_been(tier: Tier) -> None:
    old, new = _random_region(0), _random_region(0, 9)
    tier.write(0, REGIONS.parts(0, old))
    with faulty(counted=frozenset({"pwrite"}), fail_at=0, error=EIO), pytest.raises(DiskError):
        tier.write(0, REGIONS.parts(0, new))
    with pytest.raises(ScratchFileCorrupted):
        _read(tier, 0)


def test_calls_that_move_less_than_asked_are_continued(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch_file, "TIER_CHUNK_BYTES", 1 << 20)

    class Short:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def pwrite(self, fd: int, memory: memoryview, offset: int) -> int:
            return os.pwrite(fd, memory[:4096], offset)

        def preadv(self, fd: int, memories: list[memoryview], offset: int) -> int:
            return os.preadv(fd, [memories[0][:4096]], offset)

    monkeypatch.setattr(files, "os", Short())
    tier.write(0, REGIONS.parts(0, _random_region(0)))
    assert torch.equal(_read(tier, 0), _random_region(0))


def test_a_disk_without_room_is_named(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).total
    huge = build_layout(
        [
            Block(
                index=0,
                role=Role.LAYER,
                params=(Param(name="w", shape=(free,), dtype=torch.bfloat16),),
            )
        ],
        WITH_CLIP,
    )
    with pytest.raises(DiskFull, match=r"memory.disk: .* has no room for .* larger disk"):
        Tier(tmp_path, TierRegions(huge, (M,)))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"memory.disk: the folder .*none does not exist"):
        Tier(tmp_path / "none", REGIONS)


def test_the_file_has_no_name_and_its_bytes_are_reserved(tmp_path: Path, tier: Tier) -> None:
    assert list(tmp_path.iterdir()) == []
    status = os.fstat(tier._fd)
    assert status.st_nlink == 0
    assert status.st_size == REGIONS.num_bytes <= 512 * status.st_blocks


def test_a_store_with_a_tier_has_arenas_for_the_rest_only(tier: Tier) -> None:
    store = Store(LAYOUT, tier)
    ledger = store_ledger(LAYOUT, REGIONS)
    here = [line.purpose for line in ledger.lines if line.place == "host"]
    assert here == ["weights (hi)", "gradients (grad)"]
    assert ledger.total("tier") == REGIONS.num_bytes
    assert store.kinds == WITH_CLIP
    assert store.on_disk == REGIONS.kinds
    with pytest.raises(LookupError, match="m is on disk"):
        store.param("1.w", M)
    with pytest.raises(LookupError, match="lo is on disk"):
        store.arena(TensorKind.LO)


def test_views_into_a_region_reach_the_file_and_come_back(tier: Tier) -> None:
    store = Store(LAYOUT, tier)
    store.param("1.w", TensorKind.HI).fill_(1.0)
    assert torch.equal(store.master("1.w"), torch.ones(300, 7))
    region = aligned_buffer(REGIONS.region_bytes(1))
    store.param("1.w", TensorKind.LO, region).fill_(1)
    for number, segment in enumerate(LAYOUT.trained_segments(1)):
        store.segment(segment, M, region).fill_(number + 1)
    tier.write(1, REGIONS.parts(1, region))
    assert torch.equal(store.master("1.w"), torch.full((300, 7), 1.0 + 2.0**-23))
    assert (store.at_rest("1.w", M) == 1).all()
    assert (store.at_rest("1.norm", M) == 2).all()
    assert not store.at_rest("1.norm", V).any()
