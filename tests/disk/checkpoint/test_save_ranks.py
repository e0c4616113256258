"""A checkpoint that ranks save together is that of one process, or there is none."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain import HostModel
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.checkpoint.retention import clear_unfinished, finished
from megatrain.disk.checkpoint.save import write_checkpoint
from megatrain.disk.hf import joint_files
from megatrain.disk.hf.model import read_model_folder
from megatrain.engine.snapshot import Gate, Snapshot
from megatrain.errors import DiskError, DiskFull, ScratchFileCorrupted, SnapshotLost, StorageTimeout
from megatrain.memory.file_calls import FileCalls
from megatrain.memory.kinds import kinds_on_disk, store_kinds
from megatrain.memory.tier.scratch_file import Scratch
from megatrain.optim.states import STATES
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import ALONE, Ranks
from testkit.cases import at_a_push
from testkit.patience import HANG_S, eventually
from testkit.rank_threads import Together
from tests.disk.rank_homes import SHARED, fill_at_random, small, small_chunks

SIZES = (2, 3, 4, 8)
CODES = ("fp32", "bf16", "8bit")


def snapshot_of(home: HostModel, gate: Gate | None = None) -> Snapshot:
    blocks = range(home.store.layout.num_blocks)
    return Snapshot(gate or Gate(blocks), [*blocks][::-1], 7, dict.fromkeys(blocks, 0))


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of a checkpoint; those of the manifest name no folder."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def homes_of(
    folder: Path, family: str, size: int, code: str = "fp32", tier: bool = False
) -> tuple[HostModel, list[HostModel]]:
    """Return a model with random state, and the same shared by ranks."""
    kinds = store_kinds(STATES["adamw"][code], waits=False)
    found = read_model_folder(small(folder / "model", family), frozen=("*.layers.1.mlp.*",))
    scratch = Scratch(folder=folder, kinds=kinds_on_disk(kinds, "states")) if tier else None
    alone = found.load(kinds)
    homes = [found.empty(kinds, scratch, Owner(rank, size)) for rank in range(size)]
    fill_at_random(alone, homes)
    return alone, homes


def saved_by(homes: list[HostModel], parent: Path) -> list[Path]:
    def work(ranks: Ranks) -> Path:
        home = homes[ranks.owner.rank]
        training = {"note": "mine"} if ranks.owner.leads else {}
        return write_checkpoint(
            parent, checkpoint_parts(home), snapshot_of(home), training, ranks=ranks
        )

    return Together(len(homes)).run(work)


def close(homes: list[HostModel]) -> None:
    for home in homes:
        home.store.close()


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors, chunks of streams and chunks of files end at different bytes."""
    monkeypatch.setattr(joint_files, "STREAM_BYTES", 20_000)
    small_chunks(monkeypatch)


CASES = [
    (family, size, code, tier)
    for family in SHARED
    for size in SIZES
    for code in CODES
    for tier in (False, True)
]


@pytest.mark.few(4)
@pytest.mark.parametrize("case", at_a_push(CASES, 8), ids=str)
def test_the_files_are_those_of_one_process(
    case: tuple[str, int, str, bool], tmp_path: Path
) -> None:
    family, size, code, tier = case
    alone, homes = homes_of(tmp_path, family, size, code, tier)
    parent = tmp_path / "checkpoints"
    expected = write_checkpoint(
        parent, checkpoint_parts(alone), snapshot_of(alone), {"note": "mine"}, ranks=ALONE
    )
    folders = saved_by(homes, parent)
    assert len(set(folders)) == 1
    assert files_of(folders[0]) == files_of(expected)
    homes[1].store.arena(homes[1].store.kinds[0])[:1] += 1
    assert files_of(saved_by(homes, parent)[0]) != files_of(expected), "a byte would be noticed"
    close(homes)


def _failures(homes: list[HostModel], parent: Path) -> list[Exception]:
    """Save; return what each rank raises."""

    def work(ranks: Ranks) -> Exception:
        home = homes[ranks.owner.rank]
        gate = Gate(range(home.store.layout.num_blocks))
        with pytest.raises(DiskError) as found:
            write_checkpoint(
                parent, checkpoint_parts(home), snapshot_of(home, gate), {}, ranks=ranks
            )
        gate.hold({})  # nothing is held any more
        return found.value

    return Together(len(homes)).run(work)


@pytest.fixture
def older(tmp_path: Path) -> Iterator[tuple[list[HostModel], Path, Path]]:
    """Three ranks, where they save, and what they saved before."""
    _, homes = homes_of(tmp_path, "llama", 3, tier=True)
    parent = tmp_path / "checkpoints"
    yield homes, parent, saved_by(homes, parent)[0]
    close(homes)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "posix_fallocate", "ftruncate"])
def test_a_full_disk_on_one_rank_ends_the_save_of_all(
    older: tuple[list[HostModel], Path, Path], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    homes, parent, before = older
    real, kept = getattr(os, call), files_of(before)

    def full(fd: int, *args: object) -> object:
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.endswith("state/block-00002.safetensors"):
            raise OSError(28, os.strerror(28))
        return real(fd, *args)

    monkeypatch.setattr(os, call, full)
    errors = _failures(homes, parent)
    assert {type(error) for error in errors} == {DiskFull}
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("rank 2: cannot ")
    assert list(parent.iterdir()) == [before]
    assert files_of(before) == kept
    verify(before)


@pytest.mark.parametrize("call", ["mkdir", "replace"])
def test_a_folder_or_manifest_that_the_first_cannot_write_fails_the_save_of_all(
    older: tuple[list[HostModel], Path, Path], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    homes, parent, before = older
    real = getattr(os, call)

    def fail(path: object, *args: object, **names: object) -> object:
        if "manifest" in str(path) or str(path).endswith("state"):
            raise OSError(5, os.strerror(5))
        return real(path, *args, **names)

    monkeypatch.setattr(os, call, fail)
    errors = _failures(homes, parent)
    assert len({str(error) for error in errors}) == 1
    assert str(errors[1]).startswith("rank 0: cannot ")
    assert list(parent.iterdir()) == [before]


def test_a_tier_that_one_rank_cannot_read_fails_the_save_of_all(
    older: tuple[list[HostModel], Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    homes, parent, before = older
    tier = homes[1].store.tier
    assert tier is not None
    tier._digests = dict.fromkeys(tier._digests, "0" * 32)
    errors = _failures(homes, parent)
    assert {type(error) for error in errors} == {ScratchFileCorrupted}
    assert str(errors[2]).startswith("rank 1: the scratch file in ")
    assert list(parent.iterdir()) == [before]


class Stall:
    """Calls of one kind that hang on names of one kind, until they are let go."""

    def __init__(self, patch: pytest.MonkeyPatch, call: str, names: str) -> None:
        self.let_go, self.is_over = threading.Event(), False
        real = getattr(os, call)

        def hanging(what: object, *args: object, **more: object) -> object:
            name = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            if re.search(names, name) and not self.is_over:
                self.let_go.wait(HANG_S)
            return real(what, *args, **more)

        patch.setattr(os, call, hanging)


def _stalled(homes: list[HostModel], parent: Path) -> tuple[list[Exception], list[FileCalls]]:
    """Save with calls that may take a second; return what each rank raises, and its calls."""
    all_calls = [FileCalls(1.0) for _ in homes]

    def work(ranks: Ranks) -> Exception:
        home, calls = homes[ranks.owner.rank], all_calls[ranks.owner.rank]
        gate = Gate(range(home.store.layout.num_blocks))
        parts = checkpoint_parts(home)
        with pytest.raises(StorageTimeout) as found:
            write_checkpoint(parent, parts, snapshot_of(home, gate), {}, ranks=ranks, calls=calls)
        calls.close()
        gate.hold({})  # nothing is held any more
        return found.value

    return Together(len(homes)).run(work), all_calls


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("call", "names", "rank"),
    [
        ("fsync", "state/block-00002", 2),
        ("pwrite", "state/block-00002", 2),
        ("posix_fallocate", "state/block-00001", 1),
        ("open", "state/block-00001", 1),
        ("fsync", "/state$", 1),
        ("mkdir", "/state$", 0),
        ("fsync", "manifest", 0),
        ("replace", "manifest", 0),
    ],
)
def test_storage_that_stalls_on_one_rank_ends_the_save_of_all_and_harms_no_later_one(
    older: tuple[list[HostModel], Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    names: str,
    rank: int,
) -> None:
    homes, parent, before = older
    kept = files_of(before)
    stall = Stall(monkeypatch, call, rf"step-.*{names}")
    errors, all_calls = _stalled(homes, parent)
    assert len({str(error) for error in errors}) == 1
    said = re.fullmatch(
        rf"rank (\d): storage has stalled on {socket.gethostname()}: .+ returned within 1 s",
        str(errors[0]),
    )
    assert said is not None, errors[0]
    assert names == "/state$" or int(said[1]) == rank
    assert files_of(before) == kept
    hanging = [calls for calls in all_calls if calls.out is not None]
    assert hanging, "the call is still out"
    stall.is_over = True
    later = saved_by(homes, parent)[0]
    expected = files_of(later)
    stall.let_go.set()
    assert eventually(lambda: all(calls.out is None for calls in all_calls))
    assert files_of(later) == expected
    verify(later)
    assert sorted(finished(parent)) == sorted([before, later])
    clear_unfinished(parent)  # as after each save of a run
    assert sorted(parent.iterdir()) == sorted([before, later])


def test_training_that_fails_on_one_rank_fails_the_save_of_all(
    older: tuple[list[HostModel], Path, Path],
) -> None:
    homes, parent, before = older

    def work(ranks: Ranks) -> str:
        home = homes[ranks.owner.rank]
        gate = Gate(range(home.store.layout.num_blocks))
        snapshot = snapshot_of(home, gate)
        if ranks.owner.rank == 2:
            gate.fail()
        with pytest.raises(SnapshotLost) as found:
            write_checkpoint(parent, checkpoint_parts(home), snapshot, {}, ranks=ranks)
        return str(found.value)

    assert set(Together(3).run(work)) == {"rank 2: training failed while its state was being saved"}
    assert list(parent.iterdir()) == [before]


@pytest.mark.parametrize("after", [0, 3, 9])
def test_a_rank_that_dies_leaves_no_manifest(
    older: tuple[list[HostModel], Path, Path], after: int
) -> None:
    homes, parent, before = older

    class Died(BaseException):
        """Stands for the end of a process."""

    def work(ranks: Ranks) -> None:
        home = homes[ranks.owner.rank]
        if ranks.owner.rank == 1:
            calls = iter(range(after))
            real = ranks.carrier.send

            def send(data: object, rank: int) -> None:
                if next(calls, None) is None:
                    raise Died
                real(data, rank)  # type: ignore[arg-type]

            ranks.carrier.send = send  # type: ignore[method-assign]
        write_checkpoint(parent, checkpoint_parts(home), snapshot_of(home), {}, ranks=ranks)

    with pytest.raises(Died):
        Together(3).run(work)
    assert list(parent.iterdir()) == [before]
    verify(before)
