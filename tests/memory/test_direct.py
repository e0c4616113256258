"""Bytes that arrive whole, and files that appear all at once or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from megatrain import files
from megatrain.errors import DiskError, StorageTimeout
from megatrain.memory import direct
from megatrain.memory.arena import aligned_buffer
from megatrain.memory.direct import (
    CHUNK_BYTES,
    DISK_PAGE,
    DirectReader,
    DirectWriter,
    WriteQueue,
    digest,
)
from megatrain.memory.file_calls import FileCalls
from testkit.faulty_os import faulty
from testkit.patience import HANG_S, eventually

SIZES = [0, 1, 4095, 4096, 4097, CHUNK_BYTES, CHUNK_BYTES * 4 + 77]


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
    with WriteQueue() as carrier, DirectWriter(path, size, carrier) as writer:
        writer.write(data[: size // 3])
        writer.write(data[size // 3 :])
        writer.finish()
    chunks = [data[start : start + CHUNK_BYTES] for start in range(0, size, CHUNK_BYTES)]
    assert writer.digests == {n: digest(chunk.numpy().data) for n, chunk in enumerate(chunks)}
    assert path.read_bytes() == data.numpy().tobytes()
    buffer = aligned_buffer(size + 2 * DISK_PAGE)
    with DirectReader(path) as reader:
        for start, stop in [(0, size), (size // 2, size), (size // 3, size // 2), (size, size)]:
            assert torch.equal(reader.read(start, stop, buffer), data[start:stop])


@pytest.mark.usefixtures("_way")
def test_reading_past_the_end_is_an_error_with_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    buffer = aligned_buffer(3 * DISK_PAGE)
    with (
        DirectReader(tmp_path / "file") as reader,
        pytest.raises(DiskError, match="ends at byte 5000; bytes up to 6000"),
    ):
        reader.read(4990, 6000, buffer)


def test_an_unfinished_file_is_removed(tmp_path: Path) -> None:
    def write_half() -> None:
        with WriteQueue() as carrier, DirectWriter(tmp_path / "file", 10_000, carrier) as writer:
            writer.write(_bytes(5000))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.merge
@pytest.mark.parametrize("error", [5, 28])
def test_a_failure_at_any_call_is_our_error_and_leaves_nothing(tmp_path: Path, error: int) -> None:
    """And the queue can carry other files afterwards."""
    data = _bytes(CHUNK_BYTES * 9 + 5)
    with WriteQueue() as carrier:
        for fail_at in range(100):
            with faulty(fail_at=fail_at, error=error):
                try:
                    with DirectWriter(tmp_path / "file", len(data), carrier) as writer:
                        writer.write(data)
                        writer.finish()
                    break
                except DiskError as failure:
                    assert str(tmp_path / "file") in str(failure)  # noqa: PT017
            assert list(tmp_path.iterdir()) == []
        assert fail_at >= 13
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()


def test_short_writes_are_completed(tmp_path: Path) -> None:
    data = _bytes(CHUNK_BYTES + 12_345)
    real = os.pwrite

    def some(fd: int, memory: memoryview, offset: int) -> int:
        return real(fd, memory[: max(DISK_PAGE, len(memory) // 2 // DISK_PAGE * DISK_PAGE)], offset)

    with (
        pytest.MonkeyPatch.context() as patch,
        WriteQueue() as carrier,
        DirectWriter(tmp_path / "file", len(data), carrier) as writer,
    ):
        patch.setattr("megatrain.files.os.pwrite", some)
        writer.write(data)
        writer.finish()
    assert (tmp_path / "file").read_bytes() == data.numpy().tobytes()


def test_many_files_share_the_buffers_of_one_queue(tmp_path: Path) -> None:
    data = _bytes(3 * CHUNK_BYTES)
    with WriteQueue() as carrier:
        finishing = []
        for number in range(5):
            writer = DirectWriter(tmp_path / str(number), len(data), carrier)
            writer.write(data)
            finishing.append(writer.finish_later())
        for future in finishing:
            future.result()
    assert all((tmp_path / str(n)).read_bytes() == data.numpy().tobytes() for n in range(5))


@pytest.mark.parametrize("let_go", [True, False])
def test_sources_may_change_once_they_are_let_go(
    let_go: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before: threads that copy late would find other bytes."""
    data, gather = _bytes(2 * CHUNK_BYTES + 5), direct._gather
    changed = threading.Event()

    def late(pieces: list[torch.Tensor], buffer: torch.Tensor) -> None:
        changed.wait(0.2 if let_go else HANG_S)
        gather(pieces, buffer)

    monkeypatch.setattr(direct, "_gather", late)
    expected = data.numpy().tobytes()
    with WriteQueue() as carrier, DirectWriter(tmp_path / "file", len(data), carrier) as writer:
        writer.write(data)
        if let_go:
            writer.let_go()
        data.zero_()
        changed.set()
        writer.finish()
    assert ((tmp_path / "file").read_bytes() == expected) == let_go


def test_no_space_is_known_before_writing(tmp_path: Path) -> None:
    with WriteQueue() as carrier, pytest.raises(DiskError, match="cannot reserve space for"):
        DirectWriter(tmp_path / "file", 1 << 55, carrier)
    assert list(tmp_path.iterdir()) == []


def test_without_calls_that_macos_lacks_bytes_arrive_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("posix_fallocate", "posix_fadvise"):
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(files, "_O_DIRECT", 0)
    data = torch.arange(3 * DISK_PAGE + 5).to(torch.uint8)
    with WriteQueue() as carrier, DirectWriter(tmp_path / "file", len(data), carrier) as writer:
        writer.write(data)
        writer.finish()
    with DirectReader(tmp_path / "file") as reader:
        assert torch.equal(reader.read(0, len(data), aligned_buffer(6 * DISK_PAGE)), data)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "posix_fallocate"])
def test_a_file_on_stalled_storage_is_closed_when_its_call_has_returned_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """For the number of a closed descriptor could be that of another file by then."""
    real, let_go, hangs = getattr(os, call), threading.Event(), list[int]()

    def hanging(fd: int, *args: object) -> object:
        hangs.append(fd)
        let_go.wait(HANG_S)
        return real(fd, *args)

    monkeypatch.setattr(os, call, hanging)
    calls, data = FileCalls(0.2), _bytes(10_000)

    def write() -> None:
        with (
            WriteQueue(calls) as carrier,
            DirectWriter(tmp_path / "file", len(data), carrier) as writer,
        ):
            writer.write(data)
            writer.finish()

    with pytest.raises(StorageTimeout, match=str(tmp_path / "file")):
        write()
    (fd,) = hangs
    assert os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / "file")
    let_go.set()
    assert eventually(lambda: calls.out is None)
    assert not os.path.exists(f"/proc/self/fd/{fd}") or (
        os.readlink(f"/proc/self/fd/{fd}") != str(tmp_path / "file")
    )
    assert list(tmp_path.iterdir()) == []
