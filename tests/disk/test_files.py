"""Bytes that arrive whole, and files that appear all at once or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from megatrain.disk import files
from megatrain.disk.files import DirectReader, DirectWriter, aligned_buffer, write_file
from megatrain.errors import DiskError

SIZES = [0, 1, 4095, 4096, 4097, DirectWriter.BUFFER_BYTES, DirectWriter.BUFFER_BYTES * 4 + 77]


def _bytes(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@pytest.fixture(params=["direct", "cached"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "cached":
        monkeypatch.setattr(files, "_O_DIRECT", 0)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read(size: int, tmp_path: Path) -> None:
    data, path = _bytes(size), tmp_path / "file"
    with DirectWriter(path, size) as writer:
        writer.write(data[: size // 3])
        writer.write(data[size // 3 :])
        writer.finish()
    assert path.read_bytes() == data.numpy().tobytes()
    buffer = aligned_buffer(size + 2 * files.PAGE)
    with DirectReader(path) as reader:
        for start, stop in [(0, size), (size // 2, size), (size // 3, size // 2), (size, size)]:
            assert torch.equal(reader.read(start, stop, buffer), data[start:stop])


@pytest.mark.usefixtures("_way")
def test_reading_past_the_end_is_an_error_with_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    buffer = aligned_buffer(3 * files.PAGE)
    with (
        DirectReader(tmp_path / "file") as reader,
        pytest.raises(DiskError, match="ends at byte 5000; bytes up to 6000"),
    ):
        reader.read(4990, 6000, buffer)


def test_an_unfinished_file_is_removed(tmp_path: Path) -> None:
    def write_half() -> None:
        with DirectWriter(tmp_path / "file", 10_000) as writer:
            writer.write(_bytes(5000))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_is_our_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_space)

    def write() -> None:
        with DirectWriter(tmp_path / "file", 100) as writer:
            writer.write(_bytes(100))
            writer.finish()

    with pytest.raises(DiskError, match=r"cannot write .*: No space left on device"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_no_space_is_known_before_writing(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="cannot reserve space for"):
        DirectWriter(tmp_path / "file", 1 << 55)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_write_file_leaves_the_old_bytes_on_failure(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_file(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os if failing == "fsync" else Path, failing, fail)
        with pytest.raises(DiskError, match="Input/output error"):
            write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
