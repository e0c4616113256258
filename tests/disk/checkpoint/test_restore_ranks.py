"""A checkpoint of any number of ranks restores on any other number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import HostModel
from megatrain.disk.checkpoint.conversion import Conversion
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.masters import load_masters
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore
from megatrain.disk.hf.model import read_model_folder
from megatrain.disk.hf.safetensors_format import read_entries
from megatrain.errors import CheckpointCorrupted
from megatrain.memory import direct
from megatrain.memory.direct import DirectReader
from megatrain.memory.kinds import TensorKind, kinds_on_disk, store_kinds
from megatrain.memory.tier.scratch_file import Scratch
from megatrain.optim.states import STATES
from megatrain.ranks.agreement import Agreement
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import Ranks
from testkit.rank_threads import Together
from tests.disk.checkpoint.test_save_ranks import homes_of, saved_by
from tests.disk.rank_homes import SHARED, differences, small_chunks

CODES = ("fp32", "bf16", "8bit")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch)


def _empty(folder: Path, size: int, code: str, tier: Path | None = None) -> list[HostModel]:
    kinds = store_kinds(STATES["adamw"][code], waits=False)
    scratch = Scratch(folder=tier, kinds=kinds_on_disk(kinds, "states")) if tier else None
    found = read_model_folder(folder / "model", frozen=("*.layers.1.mlp.*",))
    return [found.empty(kinds, scratch, Owner(rank, size)) for rank in range(size)]


def _restore(checkpoint: Path, homes: list[HostModel], saved: str = "", wanted: str = "") -> None:
    manifest = read_manifest(checkpoint)
    for home in homes:
        conversion = None
        if saved:
            conversion = Conversion(
                layout=home.store.layout,
                saved=STATES["adamw"][saved],
                wanted=STATES["adamw"][wanted],
                seed=3,
                num_updates=dict.fromkeys(range(home.store.layout.num_blocks), 7),
            )
        restore(checkpoint, manifest, checkpoint_parts(home), conversion)


@pytest.mark.few(1)
@pytest.mark.parametrize(("family", "code"), list(zip(SHARED, CODES, strict=True)))
def test_what_four_ranks_saved_comes_back_to_any_number(
    family: str, code: str, tmp_path: Path
) -> None:
    alone, homes = homes_of(tmp_path, family, 4, code)
    checkpoint = saved_by(homes, tmp_path / "checkpoints")[0]
    for size in (1, 2, 3, 8):
        found = _empty(tmp_path, size, code, tmp_path if size == 3 else None)
        assert len(differences(found, alone)) > 10
        _restore(checkpoint, found)
        assert differences(found, alone) == [], size
        for home in found:
            home.store.close()


def test_buffers_are_read_by_all(tmp_path: Path) -> None:
    alone, homes = homes_of(tmp_path, "deepseek_v3", 2)
    for number, buffer in enumerate(alone.decoder.persistent_buffers().values()):
        buffer.fill_(number + 1)
    checkpoint = saved_by(homes, tmp_path / "checkpoints")[0]
    for home in _empty(tmp_path, 3, "fp32"):
        buffers = home.decoder.persistent_buffers().values()
        for buffer in buffers:
            buffer.zero_()
        _restore(checkpoint, [home])
        assert [float(b.view(-1)[0]) for b in buffers] == [
            float(n + 1) for n in range(len(buffers))
        ]


def _read_bytes(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]
) -> list[tuple[str, int, int]]:
    reads: list[tuple[str, int, int]] = []
    real = DirectReader.read

    def read(self: DirectReader, start: int, stop: int, buffer: Any) -> Any:
        reads.append((self.path.name, start, stop))
        return real(self, start, stop, buffer)

    with monkeypatch.context() as patch:
        patch.setattr(DirectReader, "read", read)
        work()
    return reads


def test_ranks_read_the_chunks_of_use_and_all_of_them_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, homes = homes_of(tmp_path, "llama", 4)
    checkpoint = saved_by(homes, tmp_path / "checkpoints")[0]
    manifest = read_manifest(checkpoint)
    reads = [_read_bytes(monkeypatch, partial(_restore, checkpoint, [home])) for home in homes]
    whole = _read_bytes(monkeypatch, partial(_restore, checkpoint, [alone]))
    assert set().union(*reads) == set(whole)
    assert sum(stop - start for _, start, stop in whole) == manifest.num_bytes
    for home, own in zip(homes, reads, strict=True):
        for path in (checkpoint / "state").iterdir():
            found = {start for name, start, _ in own if name == path.name}
            assert found == _of_use(home, path), "no other chunk is read"


def _of_use(home: HostModel, path: Path) -> set[int]:
    """Return where the chunks of a state file begin that have the header or a part of the rank."""
    size, chunks = direct.CHUNK_BYTES, {0}
    for entry in read_entries(path):
        kind, _, name = entry.name.partition(".")
        owned = home.store.layout.places[name].owned
        width = 2 if kind == "lo" else 4
        first, last = entry.start + owned.start * width, entry.start + owned.stop * width
        chunks |= {at // size * size for at in range(first, last)}
    return chunks


@pytest.mark.parametrize(("saved", "wanted"), [("fp32", "8bit"), ("8bit", "bf16")])
def test_states_are_converted_as_by_one_process(saved: str, wanted: str, tmp_path: Path) -> None:
    alone, homes = homes_of(tmp_path, "ernie4_5_moe", 3, saved)
    for home in (alone, *homes):  # finite numbers
        for kind in home.store.kinds:
            arena = home.store.arena(kind)
            arena.view(torch.int32).bitwise_and_(0x3F3F3F3F)
    checkpoint = saved_by(homes, tmp_path / "checkpoints")[0]
    expected = _empty(tmp_path, 1, wanted)
    _restore(checkpoint, expected, saved, wanted)
    for size in (2, 8):
        found = _empty(tmp_path, size, wanted, tmp_path if size == 2 else None)
        _restore(checkpoint, found, saved, wanted)
        assert differences(found, expected[0]) == []
        for home in found:
            home.store.close()


def test_damage_that_one_rank_finds_is_damage_for_all(tmp_path: Path) -> None:
    _, homes = homes_of(tmp_path, "llama", 3)
    checkpoint = saved_by(homes, tmp_path / "checkpoints")[0]
    path = checkpoint / "state" / "block-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the last rank
    path.write_bytes(data)
    manifest = read_manifest(checkpoint)

    def work(ranks: Ranks) -> str:
        home = homes[ranks.owner.rank]
        with pytest.raises(CheckpointCorrupted) as found, Agreement(ranks.agree):
            restore(checkpoint, manifest, checkpoint_parts(home))
        return str(found.value)

    found = set(Together(3).run(work))
    assert len(found) == 1
    assert "rank 2: " in next(iter(found))
    assert "do not match their hash (in lo." in next(iter(found))


def _load_masters(checkpoint: Path, owner: Owner, found: list[HostModel]) -> None:
    found.append(load_masters(checkpoint, owner))


def test_masters_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, homes = homes_of(tmp_path, "ernie4_5_moe", 2)
    checkpoint = saved_by(homes, tmp_path / "checkpoints")[0]
    alone = load_masters(checkpoint)
    found: list[HostModel] = []
    reads: set[tuple[str, int, int]] = set()
    for rank in range(3):
        owner = Owner(rank, 3)
        reads |= set(_read_bytes(monkeypatch, partial(_load_masters, checkpoint, owner, found)))
    assert differences(found, alone) == []
    assert alone.store.arena(TensorKind.LO).any()
    chunks = {(name, start) for name, start, _ in reads if name.startswith("block-")}
    records = read_manifest(checkpoint).files
    assert chunks == {
        (name.removeprefix("state/"), number * direct.CHUNK_BYTES)
        for name, record in records.items()
        if name.startswith("state/")
        for number in range(len(record.digests))
    }
    found[2].store.arena(TensorKind.LO)[:1] += 1
    assert len(differences(found, alone)) == 1
