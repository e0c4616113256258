"""Files that appear all at once or not at all, and folders with a single owner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain import files
from megatrain.errors import DiskError, RunFolderError
from testkit.faulty_os import faulty


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
