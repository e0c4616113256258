"""An export by ranks is that of one process, written by the first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain import HostModel
from megatrain.disk.hf import joint_files
from megatrain.disk.hf.export import Origin
from megatrain.errors import DiskFull, ScratchFileCorrupted
from megatrain.ranks.ranks import Ranks
from testkit.rank_threads import Together
from tests.disk.checkpoint.test_save_ranks import close, files_of, homes_of
from tests.disk.rank_homes import SHARED, small_chunks


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_files, "STREAM_BYTES", 20_000)
    small_chunks(monkeypatch)


def _export(homes: list[HostModel], folder: Path, *, masters: bool = False) -> None:
    def work(ranks: Ranks) -> None:
        homes[ranks.owner.rank].export(
            folder, shard_bytes=70_000, origin=Origin(step=3), masters=masters, ranks=ranks
        )

    Together(len(homes)).run(work)


@pytest.mark.few(5)
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize(("family", "size"), list(zip(SHARED, (2, 3, 8), strict=True)))
def test_the_files_are_those_of_one_process(
    family: str, size: int, masters: bool, tmp_path: Path
) -> None:
    alone, homes = homes_of(tmp_path, family, size, tier=masters)
    alone.export(tmp_path / "one", shard_bytes=70_000, origin=Origin(step=3), masters=masters)
    _export(homes, tmp_path / "ranks", masters=masters)
    expected = files_of(tmp_path / "one")
    assert len(expected) > 4
    assert files_of(tmp_path / "ranks") == expected
    homes[1].store.arena(homes[1].store.kinds[0])[:1] += 1
    _export(homes, tmp_path / "changed", masters=masters)
    assert files_of(tmp_path / "changed") != expected, "a byte would be noticed"
    close(homes)


@pytest.mark.parametrize("call", ["pwrite", "replace"])
def test_a_full_disk_of_the_first_ends_all_and_keeps_the_old_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    _, homes = homes_of(tmp_path, "llama", 3)
    _export(homes, tmp_path / "out")
    before = files_of(tmp_path / "out")
    del before["megatrain.json"]  # a record is removed first
    real = getattr(os, call)
    for fail_at in (0, 4):
        left = iter(range(fail_at))

        def full(*args: object, left: object = left) -> object:
            if next(left, None) is None:  # type: ignore[call-overload]
                raise OSError(28, os.strerror(28))
            return real(*args)

        def work(ranks: Ranks) -> str:
            with pytest.raises(DiskFull) as found:
                homes[ranks.owner.rank].export(tmp_path / "out", shard_bytes=70_000, ranks=ranks)
            return str(found.value)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            said = set(Together(3).run(work))
        assert len(said) == 1
        assert next(iter(said)).startswith("rank 0: cannot ")
        assert files_of(tmp_path / "out") == before


def test_a_part_that_cannot_be_read_ends_all_and_leaves_nothing(tmp_path: Path) -> None:
    _, homes = homes_of(tmp_path, "llama", 3, tier=True)
    tier = homes[2].store.tier
    assert tier is not None
    tier._digests = dict.fromkeys(tier._digests, "0" * 32)

    def work(ranks: Ranks) -> None:
        with pytest.raises(ScratchFileCorrupted, match=r"^rank 2: the scratch file"):
            homes[ranks.owner.rank].export(tmp_path / "out", masters=True, ranks=ranks)

    Together(3).run(work)
    assert not list(tmp_path.glob("*out*"))
    close(homes)
