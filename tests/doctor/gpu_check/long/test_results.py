"""The archive of a long check is whole whenever its writer is killed, and names nobody."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from megatrain.doctor.gpu_check.long import results as module
from megatrain.doctor.gpu_check.long.parts import PARTS
from megatrain.doctor.gpu_check.long.results import PartResult, ResultFolder
from megatrain.doctor.gpu_check.long.running import new_result
from testkit.patience import HANG_S

WRITER = """
import dataclasses, os, pathlib, sys, time
from megatrain import files
from megatrain.doctor.gpu_check.long import results
from megatrain.doctor.gpu_check.long.parts import PARTS
from megatrain.doctor.gpu_check.long.running import new_result
def write_half(fd, memory, offset):
    os.pwrite(fd, memory[:len(memory) // 2], offset)
    print("half", flush=True)
    time.sleep(1000)
def write_in_place(path, data):
    write_half(os.open(path, os.O_WRONLY | os.O_TRUNC), data, 0)
folder = results.ResultFolder(pathlib.Path(sys.argv[1]))
folder.open()
for number in (1, 2):
    result = new_result(PARTS[0], "here", "done", "")
    folder.write(dataclasses.replace(result, found={"lead": f"{number}"}))
    if number == 2 and sys.argv[2] == "beside":
        files.write_at = write_half
    if number == 2 and sys.argv[2] == "in place":
        results.write_file = write_in_place
    folder.pack()
"""


def members(archive: Path) -> dict[str, bytes]:
    """Read an archive as somebody does who gets it."""
    with tarfile.open(archive) as opened:
        files = {entry.name: opened.extractfile(entry) for entry in opened.getmembers()}
        return {name: file.read() for name, file in files.items() if file is not None}


def killed_while_writing(folder: Path, how: str) -> None:
    """Let a process write an archive and half of the next one, and kill it there."""
    command = [sys.executable, "-c", WRITER, str(folder), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
        process.wait(HANG_S)


def test_a_kill_leaves_a_whole_archive(tmp_path: Path) -> None:
    killed_while_writing(tmp_path / "check", "beside")
    result = json.loads(members(tmp_path / "check.tar.gz")["check/check.json"])
    assert result["found"]["lead"] == "1"


def test_an_archive_that_is_written_in_place_would_not_be_whole(tmp_path: Path) -> None:
    killed_while_writing(tmp_path / "check", "in place")
    with pytest.raises((tarfile.TarError, EOFError, OSError, ValueError, KeyError)):
        json.loads(members(tmp_path / "check.tar.gz")["check/check.json"])


def test_what_a_killed_part_left_is_removed(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path / "check")
    (folder.path / ".scratch-1" / "model").mkdir(parents=True)
    folder.open()
    assert list(folder.path.iterdir()) == []


def result_of(**changes: object) -> PartResult:
    fields = {name: getattr(RESULT, name) for name in RESULT.__slots__}
    return PartResult(**fields | changes)


RESULT = new_result(PARTS[0], "here", "done", "")


def test_a_result_is_found_again_on_its_machine_alone(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path / "check")
    folder.open()
    folder.write(RESULT)
    assert folder.read("check", "here") == RESULT
    assert folder.read("check", "there") is None
    assert folder.read("matrix", "here") is None
    path = folder.path / "check.json"
    path.write_bytes(path.read_bytes()[:-20])
    assert folder.read("check", "here") is None


def test_no_path_and_no_host_leaves_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "node", lambda: "secret-host")
    folder = ResultFolder(tmp_path / "check")
    folder.open()
    folder.write(result_of(why=f"no file {tmp_path}/model on secret-host", found={"x": "/a/b/c"}))
    folder.attach_log("check.log", f'File "{tmp_path}/x.py", line 3\nsecret-host: failed\n')
    folder.attach_log("empty.log", "")
    folder.pack()
    found = members(folder.archive)
    assert sorted(found) == ["check/check.json", "check/check.log"]
    texts = b"".join(found.values())
    assert b"secret-host" not in texts
    assert str(tmp_path).encode() not in texts
    assert b"/a/b/c" not in texts
    with tarfile.open(folder.archive) as opened:
        assert {(entry.uname, entry.mtime) for entry in opened.getmembers()} == {("", 0)}


def test_the_last_lines_of_a_log_are_kept(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path / "check")
    folder.open()
    folder.attach_log("x.log", "\n".join(map(str, range(1000))))
    lines = (folder.path / "x.log").read_text().split()
    assert len(lines) == module._MOST_LOG_LINES
    assert lines[-1] == "999"
    folder.attach_log("x.log", "")
    assert not (folder.path / "x.log").exists(), "a later trial printed nothing"
