"""Files that appear all at once or not at all, and folders with a single owner."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain import files
from megatrain.errors import DiskError, RunFolderError
from testkit.faulty_os import faulty, recorded, volatile


@pytest.mark.parametrize("error", [5, 28])
def test_write_file_leaves_the_old_bytes_or_the_new(error: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    seen = []
    for fail_at in range(20):
        files.write_file(path, b"old")
        with faulty(fail_at=fail_at, error=error):
            try:
                files.write_file(path, b"new")
                break
            except DiskError as failure:
                assert os.strerror(error) in str(failure)  # noqa: PT017
        seen.append(path.read_bytes())
        assert list(tmp_path.iterdir()) == [path]
    assert seen == [b"old", b"old", b"old", b"old", b"new", b"new"]
    assert path.read_bytes() == b"new"


def test_append_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for number in range(3):
        files.append(path, f"{number}\n".encode())
    assert files.sync_file(path) == 6
    files.cut(path, 4)
    files.cut(path, 100)
    files.cut(tmp_path / "none", 4)
    assert path.read_bytes() == b"0\n1\n"
    assert files.sync_file(tmp_path / "none") == 0


def test_remove_folder_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").write_text("kept")
    (tmp_path / "mine" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "mine" / "deep" / "file").write_text("gone")
    files.remove_folder(tmp_path / "mine")
    files.remove_folder(tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert (tmp_path / "other" / "kept").exists()


def test_a_link_points_elsewhere_at_once(tmp_path: Path) -> None:
    for target in ("a", "b"):
        files.point(tmp_path / "last", target)
        assert os.readlink(tmp_path / "last") == target
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


@pytest.mark.parametrize("name", ["link", "link/run"])
def test_a_folder_behind_a_link_to_nothing_is_our_error(tmp_path: Path, name: str) -> None:
    """Such as a disk that is not mounted."""
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(DiskError, match=r"link is a link to .*gone, which is not there"):
        files.make_folder(tmp_path / name)


def test_a_lock_has_one_holder_and_names_it(tmp_path: Path) -> None:
    held = files.lock(tmp_path / ".lock")
    with pytest.raises(RunFolderError, match=rf"another process \({os.getpid()}\) is writing"):
        files.lock(tmp_path / ".lock")
    files.close(held)
    files.close(files.lock(tmp_path / ".lock"))


def test_only_remains_are_cleared(tmp_path: Path) -> None:
    path = tmp_path / "scores"
    killed, folder, written, recent = (files.temporary_name(path) for _ in range(4))
    killed.write_bytes(b"half")
    folder.mkdir()
    (folder / "documents").write_bytes(b"half")
    path.write_bytes(b"whole")
    recent.write_bytes(b"half")
    with files.open_new(written):
        for old in (killed, folder, folder / "documents", written, path):
            os.utime(old, (0, 0))
        files.clear_remains(tmp_path)
        assert set(tmp_path.iterdir()) == {path, written, recent}
    others = tmp_path / ".editor.tmp"
    others.write_bytes(b"not ours")
    os.utime(others, (0, 0))
    files.clear_remains(tmp_path, "other")
    assert set(tmp_path.iterdir()) == {path, written, recent, others}
    files.clear_remains(tmp_path, "scores")  # nobody writes to it any more
    assert set(tmp_path.iterdir()) == {path, recent, others}


def _append(path: Path) -> None:
    files.append(path, b"ours")


def _cut(path: Path) -> None:
    files.cut(path, 1)


def _lock(path: Path) -> None:
    files.close(files.lock(path))


@pytest.mark.parametrize("write", [_append, _cut, _lock])
@pytest.mark.parametrize("is_there", [True, False], ids=["file", "nothing"])
def test_no_link_is_followed_for_writing(
    write: Callable[[Path], None], is_there: bool, tmp_path: Path
) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    if is_there:
        victim.write_bytes(b"precious")
    link.symlink_to(victim)
    with pytest.raises(DiskError, match=r"link is a link to .*victim, and no link is followed"):
        write(link)
    assert victim.exists() == is_there
    assert not is_there or victim.read_bytes() == b"precious"


def test_new_bytes_replace_a_link(tmp_path: Path) -> None:
    victim, link, source = tmp_path / "victim", tmp_path / "link", tmp_path / "source"
    source.write_bytes(b"ours")
    writes: list[Callable[[], None]] = [
        lambda: files.write_file(link, b"ours"),
        lambda: files.copy_file(source, link),
    ]
    for write in writes:
        victim.write_bytes(b"precious")
        link.symlink_to(victim)
        write()
        assert not link.is_symlink()
        assert link.read_bytes() == b"ours"
        assert victim.read_bytes() == b"precious"
        link.unlink()
    link.symlink_to(victim)
    with pytest.raises(FileExistsError):
        files.open_new(link)
    assert not files.write_new(link, b"ours")
    with pytest.raises(OSError, match="symbolic link"):
        files.open_direct(link, os.O_WRONLY | os.O_CREAT)
    assert victim.read_bytes() == b"precious"


def _write_file(path: Path, source: Path) -> None:
    files.write_file(path, b"ours")


def _copy_file(path: Path, source: Path) -> None:
    files.copy_file(source, path)


def _write_new(path: Path, source: Path) -> None:
    assert files.write_new(path, b"ours")


def _rename(path: Path, source: Path) -> None:
    files.rename(source, path)


def _make_folder(path: Path, source: Path) -> None:
    files.make_folder(path / "deep")


@pytest.mark.parametrize("write", [_write_file, _copy_file, _write_new, _rename, _make_folder])
def test_a_power_loss_takes_nothing_that_was_written(
    write: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    """Neither bytes nor the name; and no name is there before its bytes."""
    source, path = tmp_path / "source", tmp_path / "new"
    source.write_bytes(b"ours")
    with recorded() as changes:
        write(path, source)
    assert path.exists()
    assert changes
    assert volatile(changes) == set()
    for number, (action, old, _) in enumerate(changes):
        if action in ("rename", "link") and old != source:
            assert old in [one for act, one, _ in changes[:number] if act == "fsync"]


def test_chunks_of_a_file_are_durable(tmp_path: Path) -> None:
    with recorded() as changes:
        with files.write_chunks(tmp_path / "new", 4) as write:
            write(b"ours", 0)
        assert volatile(changes) == {tmp_path / "new"}  # the name is left to the caller
        assert ("fsync", tmp_path / "new", tmp_path / "new") in changes
        files.sync_folder(tmp_path)
    assert volatile(changes) == set()


def test_a_write_that_is_not_durable_would_be_noticed(tmp_path: Path) -> None:
    with recorded() as changes:
        files.write_file(tmp_path / "new", b"ours", durable=False)
    assert volatile(changes) == {tmp_path / "new"}
