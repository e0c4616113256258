"""Parts as processes: one that fails, is killed or hangs ends alone; what is done stays done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatrain.doctor.gpu_check.long import running
from megatrain.doctor.gpu_check.long.parts import PARTS, TOTAL_S, Part
from megatrain.doctor.gpu_check.long.results import PartResult, ResultFolder
from megatrain.doctor.gpu_check.long.running import LongRun, command_of, part_asked_for
from testkit.patience import HANG_S, eventually
from tests.doctor.gpu_check.long.test_results import members

PART = """
import dataclasses, os, pathlib, signal, sys, time
from megatrain.doctor.gpu_check.long.parts import Part
from megatrain.doctor.gpu_check.long.results import ResultFolder
from megatrain.doctor.gpu_check.long.running import PART, new_result
from megatrain.ranks.launcher import end_with_launcher
end_with_launcher()
folder = ResultFolder(pathlib.Path(sys.argv[1]))
name = os.environ[PART].split()[0]
part = Part(name=name, asks="?", module="", budget_s=1)
def write(state, why="", **found):
    folder.write(dataclasses.replace(new_result(part, "here", state, why), found=found))
with (folder.path / f"{name}.began").open("a") as file:
    file.write(f"{os.getpid()}\\n")
print("is at work")
if name in ("killed", "waits"):
    write("unfinished", rows=3)
if name == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if name == "fails":
    sys.exit("it broke")
while name in ("hangs", "waits"):
    time.sleep(0.01)
write("left out" if name == "absent" else "done", "no package" if name == "absent" else "", rows=9)
"""
RUN = """
import pathlib, sys
from megatrain.doctor.gpu_check.long.parts import Part
from megatrain.doctor.gpu_check.long.results import ResultFolder
from megatrain.doctor.gpu_check.long.running import LongRun
path = pathlib.Path(sys.argv[1])
parts = [Part(name=name, asks="?", module="", budget_s=600) for name in sys.argv[3:]]
LongRun(folder=ResultFolder(path), machine="here", say=print, write_pages=lambda: None,
        command=(sys.executable, "-c", sys.argv[2], str(path)), parts=parts).run()
"""


def parts_called(*names: str, budget_s: float = 600.0) -> list[Part]:
    return [Part(name=name, asks="?", module="", budget_s=budget_s) for name in names]


def run(folder: Path, *names: str, said: list[str] | None = None, **how: Any) -> list[PartResult]:
    budget_s = how.pop("budget_s", 600.0)
    lines = [] if said is None else said
    return LongRun(
        folder=ResultFolder(folder),
        machine="here",
        command=(sys.executable, "-c", PART, str(folder)),
        say=lines.append,
        write_pages=lambda: None,
        parts=parts_called(*names, budget_s=budget_s),
        **how,
    ).run()


def num_begun(folder: Path, name: str) -> int:
    path = folder / f"{name}.began"
    return len(path.read_text().split()) if path.exists() else 0


def test_a_part_that_ends_badly_ends_alone(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "check"
    results = run(folder, "fails", "killed", "absent", "works", said=said)
    states = {result.name: (result.state, result.why) for result in results}
    assert states == {
        "fails": ("failed", "it ended with exit code 1: it broke; see fails.log"),
        "killed": ("failed", "it was killed (SIGKILL): memory may have run out, see dmesg"),
        "absent": ("left out", "no package"),
        "works": ("done", ""),
    }
    assert results[1].found == {"rows": 3}, "what it had found stays"
    found = members(tmp_path / "check.tar.gz")
    assert b"it broke" in found["check/fails.log"]
    assert {"check/killed.json", "check/works.json"} <= set(found)
    assert any("part 4 of 4, works: is at work" in line for line in said)


def test_what_is_settled_is_not_done_again_and_the_rest_is(tmp_path: Path) -> None:
    folder = tmp_path / "check"
    for _ in range(2):
        run(folder, "works", "absent", "fails")
    assert [num_begun(folder, name) for name in ("works", "absent", "fails")] == [1, 1, 2]
    (folder / "works.json").unlink()
    run(folder, "works")
    assert num_begun(folder, "works") == 2


def test_a_part_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GRACE_S", 0.1)
    hung, after = run(tmp_path / "check", "hangs", "works", budget_s=2.0)
    assert (hung.state, after.state) == ("failed", "done")
    assert "did not end within its 2 s" in hung.why


def test_no_part_begins_once_the_time_is_over(tmp_path: Path) -> None:
    (late,) = run(tmp_path / "check", "works", total_s=1.0)
    assert late.state == "unfinished"
    assert "run the command again" in late.why
    assert num_begun(tmp_path / "check", "works") == 0
    (done,) = run(tmp_path / "check", "works")
    assert done.state == "done"


def test_a_kill_in_the_middle_leaves_an_archive_and_no_process(tmp_path: Path) -> None:
    folder, archive = tmp_path / "check", tmp_path / "check.tar.gz"
    command = [sys.executable, "-c", RUN, str(folder), PART, "works", "waits"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        assert eventually(lambda: (folder / "waits.json").exists())
        process.send_signal(signal.SIGKILL)
        process.wait(HANG_S)
    assert b'"state": "done"' in members(archive)["check/works.json"]
    number = int((folder / "waits.began").read_text())
    assert eventually(lambda: not _lives(number)), "the part's process outlives its parent"
    results = run(folder, "works")
    assert results[0].found == {"rows": 9}
    assert num_begun(folder, "works") == 1


def _lives(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{number}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_part_is_named_by_the_environment() -> None:
    assert part_asked_for({}) is None
    part, seconds = part_asked_for({running.PART: "matrix 12.5"}) or (PARTS[0], 0.0)
    assert (part.name, seconds) == ("matrix", 12.5)


def test_children_are_started_as_this_process_was() -> None:
    words = ["python3", "-m", "testkit.host_gpu", "gpu-check", "--long"]
    assert command_of("gpu-check", words) == (sys.executable, "-m", "testkit.host_gpu")
    assert command_of("gpu-check", ["python3", "-m", "pytest"])[1:] == ("-m", "megatrain")


def test_all_parts_together_keep_within_the_time() -> None:
    assert sum(part.budget_s for part in PARTS) <= TOTAL_S
    assert len({part.name for part in PARTS}) == len(PARTS) == 9
