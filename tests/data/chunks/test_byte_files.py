"""Bytes by position, of files and of objects in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.data.chunks import byte_files as byte_files_module
from megatrain.data.chunks.byte_files import byte_files
from megatrain.errors import DataError
from megatrain.places import FolderPlace
from testkit.faulty_place import FaultyPlace


def test_a_read_gives_the_bytes_that_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(200)))
    (tmp_path / "b.txt").write_text("not among them")
    (file,) = byte_files(tmp_path, (".bin",))
    assert file.read(10, 20) == bytes(range(10, 20))
    assert file.read(5, 5) == b""
    path.write_bytes(bytes(range(150)))
    with pytest.raises(DataError, match=r"a\.bin ends at byte 150, and had 200 bytes when"):
        file.read(140, 160)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.bin: cannot read byte 140: No such file"):
        file.read(140, 160)


def test_the_mark_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    seen = set()
    for data in (bytes(9000), bytes(9001), b"\x01" + bytes(8999), bytes(8999) + b"\x01"):
        path.write_bytes(data)
        (file,) = byte_files(path, (".bin",))
        seen.add(file.mark())
    assert len(seen) == 4
    again = tmp_path / "again.bin"
    again.write_bytes(data)
    assert byte_files(again, (".bin",))[0].mark() == file.mark()  # wherever it lies


def test_objects_are_read_in_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = FaultyPlace(FolderPlace(tmp_path))
    monkeypatch.setattr(byte_files_module, "open_place", lambda url: bucket)
    bucket.write("a.bin", bytes(range(200)))
    bucket.write("a.idx", b"")
    bucket.calls.clear()
    (file,) = byte_files("s3://bucket/tokens", (".bin",))
    assert file.read(10, 20) == bytes(range(10, 20))
    assert [call for call in bucket.calls if call[0] == "read"] == [("read", "a.bin")]
    bucket.write("a.bin", bytes(15))
    with pytest.raises(DataError, match="gave 5 of 10 bytes at byte 10: it changed"):
        file.read(10, 20)
    bucket.delete("a.bin")
    with pytest.raises(DataError, match="is gone at byte 10"):
        file.read(10, 20)


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/tokens"])
def test_an_empty_bucket_has_no_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """A bucket alone has nothing above it, where the object of its name could be."""

    def opened(asked: str) -> FolderPlace:
        assert asked in (url, "s3://bucket")
        return FolderPlace(tmp_path)

    monkeypatch.setattr(byte_files_module, "open_place", opened)
    with pytest.raises(DataError, match=rf"{url}: there is no object here with \.bin\."):
        byte_files(url, (".bin",))
