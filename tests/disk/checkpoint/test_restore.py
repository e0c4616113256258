"""Laws of restore.py: right bits come back, wrong ones are found and named."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from megatrain import HostModel
from megatrain.disk.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from megatrain.disk.checkpoint.parts import Parts, checkpoint_parts
from megatrain.disk.checkpoint.restore import restore, verify
from megatrain.errors import CheckpointCorrupted, CheckpointMismatch, DiskError
from megatrain.memory.kinds import TensorKind
from megatrain.optim.states import M, V
from testkit.faulty_os import READS, faulty
from tests.disk.checkpoint.saving import (
    KINDS,
    restored,
    same,
    save,
    state_of,
    tiny_model,
    train,
    training,
)

CHUNKED = ("memory.direct", "disk.checkpoint.checked_read", "disk.checkpoint.manifest")
STATE = "state/block-00001.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[HostModel, Path]:
    folder = tmp_path_factory.mktemp("saved")
    home = tiny_model(folder / "model")
    with training(home) as engine:
        train(engine, 0, 2)
        save(engine, checkpoint_parts(home), folder / "checkpoints", note="first")
        train(engine, 2, 3)
        save(engine, checkpoint_parts(home), folder / "checkpoints", note="second")
    return home, folder / "checkpoints"


@pytest.fixture
def folder(saved: tuple[HostModel, Path], tmp_path: Path) -> Path:
    """A copy of the first checkpoint."""
    return Path(shutil.copytree(sorted(saved[1].iterdir())[0], tmp_path / "copy"))


@pytest.fixture
def other(saved: tuple[HostModel, Path]) -> Path:
    """A later checkpoint of the same run."""
    return sorted(saved[1].iterdir())[1]


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_every_bit_comes_back(saved: tuple[HostModel, Path], folder: Path, other: Path) -> None:
    home, _ = saved
    first, second = restored(folder, home), restored(other, home)
    assert not same(first, second)
    assert same(restored(folder, home), first)
    assert verify(folder).training == {"note": "first"}


def test_a_bit_that_is_not_restored_would_be_noticed(
    saved: tuple[HostModel, Path], folder: Path
) -> None:
    home, _ = saved
    first = restored(folder, home)
    name = home.decoder.params[-1].name
    for kind in KINDS:
        home.store.param(name, kind).view(-1).view(torch.uint8)[0] ^= 1
        assert not same(state_of(home), first)
        restored(folder, home)


def test_files_smaller_and_larger_than_a_chunk_come_back(
    saved: tuple[HostModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that begin, end, or lie whole within a chunk, and span several."""
    home, _ = saved
    for chunk_bytes in (4096, 12288):
        for module in CHUNKED:
            monkeypatch.setattr(f"megatrain.{module}.CHUNK_BYTES", chunk_bytes)
        with training(home) as engine:
            train(engine, 0, 1)
            path = save(engine, checkpoint_parts(home), tmp_path / str(chunk_bytes))
        expected = state_of(home)
        assert max(len(r.digests) for r in read_manifest(path).files.values()) > 3
        assert same(restored(path, home), expected)


@pytest.mark.parametrize("number", range(12))
def test_a_flipped_bit_anywhere_is_found_and_named(folder: Path, number: int) -> None:
    manifest = read_manifest(folder)
    draw = random.Random(number)
    name = draw.choice(sorted(manifest.files))
    _flip(folder / name, draw.randrange(manifest.files[name].num_bytes))
    with pytest.raises(CheckpointCorrupted, match=rf"{name}: bytes \d+ to \d+ do not match"):
        verify(folder)


def test_the_tensor_is_named(
    saved: tuple[HostModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = saved
    for module in CHUNKED:
        monkeypatch.setattr(f"megatrain.{module}.CHUNK_BYTES", 4096)
    with training(home) as engine:
        train(engine, 0, 1)
        parts = checkpoint_parts(home)
        path = save(engine, parts, tmp_path / "checkpoints")
    (file,) = [f for files in parts.blocks for f in files if f.name == STATE]
    start, tensor = next(file.placed())
    _flip(path / STATE, start + 5)
    with pytest.raises(CheckpointCorrupted, match=rf"\(in {tensor.name}"):
        verify(path)
    _flip(path / STATE, 3)  # now the header cannot be read either
    with pytest.raises(CheckpointCorrupted, match="do not match their hash"):
        verify(path)


def test_many_tensors_in_a_chunk_are_not_all_named(folder: Path) -> None:
    _flip(folder / STATE, (folder / STATE).stat().st_size - 1)
    with pytest.raises(CheckpointCorrupted, match=r"\(in m\.\S+, m\.\S+, m\.\S+ and \d+ more\)"):
        verify(folder)


@pytest.mark.parametrize("hurt", ["cut", "longer", "missing", "swapped", "stale", "empty"])
def test_files_that_are_not_those_that_were_written(folder: Path, other: Path, hurt: str) -> None:
    path = folder / STATE
    if hurt == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif hurt == "longer":
        path.write_bytes(path.read_bytes() + b"\0")
    elif hurt == "missing":
        path.unlink()
    elif hurt == "swapped":
        path.write_bytes((folder / "state/block-00002.safetensors").read_bytes())
    elif hurt == "stale":
        shutil.copy(other / STATE, path)
    else:
        path.write_bytes(b"")
    with pytest.raises(
        CheckpointCorrupted, match=r"block-00001\.safetensors(: | )(is missing|has|bytes)"
    ):
        verify(folder)


def test_a_stale_manifest_is_found(folder: Path, other: Path) -> None:
    shutil.copy(other / MANIFEST_NAME, folder / MANIFEST_NAME)
    with pytest.raises(CheckpointCorrupted, match="do not match their hash"):
        verify(folder)


def test_files_that_the_manifest_does_not_name_are_left_alone(
    saved: tuple[HostModel, Path], folder: Path
) -> None:
    home, _ = saved
    expected = restored(folder, home)
    (folder / "model" / "README.md").write_text("a note")
    (folder / "state" / "block-00099.safetensors").write_bytes(b"junk")
    assert same(restored(folder, home), expected)


def test_the_store_never_holds_bytes_that_failed_their_hash(
    saved: tuple[HostModel, Path], folder: Path
) -> None:
    home, _ = saved
    _flip(folder / STATE, 5000)
    for kind in KINDS:
        home.store.arena(kind).fill_(0xAB)
    with pytest.raises(CheckpointCorrupted):
        restore(folder, read_manifest(folder), checkpoint_parts(home))
    for place in home.store.layout.block_places(1):
        for kind in (M, V, TensorKind.LO):
            if place.has(kind):
                held = home.store.param(place.param.name, kind).view(-1).view(torch.uint8)
                assert bool((held == 0xAB).all())


def test_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    frozen = tiny_model(tmp_path / "frozen", frozen=("model.embed_*",))
    with pytest.raises(CheckpointMismatch, match=r"belongs to another model, or model\.frozen"):
        restore(folder, read_manifest(folder), checkpoint_parts(frozen))


def test_the_header_of_another_model_is_refused_although_the_mark_agrees(
    saved: tuple[HostModel, Path], folder: Path
) -> None:
    home, _ = saved
    parts = checkpoint_parts(home)
    for files in parts.blocks:
        for file in files:
            if file.name == STATE:
                header = bytearray(file.header)
                header[20] ^= 1
                file.__dict__["header"] = bytes(header)
    with pytest.raises(CheckpointMismatch, match="its tensors do not match this model"):
        restore(folder, read_manifest(folder), parts)


def test_a_manifest_without_a_file_of_the_model_is_refused(
    saved: tuple[HostModel, Path], folder: Path
) -> None:
    home, _ = saved
    manifest = read_manifest(folder)
    parts = checkpoint_parts(home)
    without = {name: record for name, record in manifest.files.items() if name != STATE}
    lacking = Manifest(
        step=manifest.step, files=without, model=manifest.model, training=manifest.training
    )
    with pytest.raises(CheckpointCorrupted, match="does not match the model of the manifest"):
        restore(folder, lacking, parts)


def test_a_failing_read_is_told_at_every_call(saved: tuple[HostModel, Path], folder: Path) -> None:
    home, _ = saved
    parts: Parts = checkpoint_parts(home)
    manifest = read_manifest(folder)
    for fail_at in range(10_000):
        with faulty(fail_at=fail_at, error=5, counted=READS):
            try:
                restore(folder, manifest, parts)
                break
            except DiskError as error:
                assert "Input/output error" in str(error)  # noqa: PT017
    assert fail_at >= 2 * len(manifest.files)


def test_short_reads_are_completed(
    saved: tuple[HostModel, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _ = saved
    expected = restored(folder, home)
    real = os.preadv

    def some(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real(fd, [buffers[0][: max(4096, len(buffers[0]) // 2 // 4096 * 4096)]], offset)

    monkeypatch.setattr(os, "preadv", some)
    assert same(restored(folder, home), expected)
