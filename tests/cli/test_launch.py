"""Ranks of this host, started by `megatrain train --gpus N`. The ranks are small programs here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatrain.cli import launch as launching
from megatrain.cli.launch import exit_code, first_failure, without_option
from megatrain.errors import NoDevice
from testkit.patience import HANG_S, eventually
from testkit.strangers import LOOPBACK, listeners
from testkit.warm_python import warm_python

ROOT = Path(__file__).parents[2]
LAUNCH = f"""
import os, sys
from megatrain.cli.launch import run_ranks
os.environ["PYTHONPATH"] = {str(ROOT / "src")!r}
code, end_s = sys.argv[1:]
sys.exit(run_ranks([sys.executable, "-c", code], 2, int(end_s)))
"""
RANK = """
import json, os, pathlib, signal, sys, time
rank, told = os.environ["RANK"], []

def tell():
    found = {"pid": os.getpid(), "parent": os.getppid(), "told": told, "set": dict(os.environ)}
    text = json.dumps(found)
    pathlib.Path(f"{rank}.new").write_text(text)
    pathlib.Path(f"{rank}.new").rename(rank)
"""
LISTENS = (
    RANK
    + """
def take(number, frame):
    told.append(signal.Signals(number).name)
    tell()
    if len(told) == int(os.environ["ENDS_AT"]):
        sys.exit(130)

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, take)
tell()
while True:
    time.sleep(0.01)
"""
)
SLEEPS = RANK + "tell()\ntime.sleep(3600)"
ONE_FAILS = RANK + "tell()\nsys.exit(4) if rank == '1' else time.sleep(3600)"
ONE_SAYS_WHY = (
    RANK
    + """
from megatrain.errors import DiskFull
from megatrain.ranks.launcher import record
tell()
if rank == "0":
    time.sleep(3600)
record(DiskFull("my disk is full"))
sys.exit(4)
"""
)
DOES_NOT_END = (
    RANK
    + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell()
while rank == "0" or not pathlib.Path("0").exists():
    time.sleep(0.01)
sys.exit(4)
"""
)
ENDS_WITH_LAUNCHER = (
    "from megatrain.ranks.launcher import end_with_launcher\n"
    + RANK
    + ("end_with_launcher()\ntell()\ntime.sleep(3600)")
)
END_S = 2


class Launched:
    """A launcher of two small ranks that work in a folder."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self._folder = process, folder

    def ranks(self) -> list[dict[str, Any]]:
        """Return what each has told, once both have."""
        paths = [self._folder / str(rank) for rank in range(2)]

        def have_come() -> bool:
            return all(path.exists() for path in paths)

        assert eventually(lambda: have_come() or self.process.poll() is not None)
        assert have_come(), self.process.stderr and self.process.stderr.read()
        return [json.loads(path.read_text()) for path in paths]

    def signal(self, number: int) -> None:
        """Signal the launcher, once its ranks have told that they listen."""
        os.kill(self.ranks()[0]["parent"], number)

    def end(self) -> tuple[int, str]:
        _, text = self.process.communicate(timeout=HANG_S)
        return self.process.returncode, text

    def are_gone(self) -> bool:
        return not any(_is_alive(rank["pid"]) for rank in self.ranks())


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def launched(code: str, folder: Path, ends_at: int = 1) -> Iterator[Launched]:
    process = subprocess.Popen(
        [*warm_python().command, "-c", LAUNCH, code, str(END_S)],
        cwd=folder, env={**os.environ, "ENDS_AT": str(ends_at)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    found = Launched(process, folder)
    try:
        yield found
    finally:
        process.kill()
        for path in folder.glob("[0-9]"):
            pid = json.loads(path.read_text())["pid"]
            if _is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize(
    "words",
    [
        ["train", "run.yaml", "--gpus", "2", "train.epochs=2", "--resume"],
        ["train", "--gpus=2", "run.yaml", "train.epochs=2", "--resume"],
        ["train", "run.yaml", "train.epochs=2", "--resume", "--gpus", "2"],
    ],
)
def test_all_other_words_are_passed_on(words: list[str]) -> None:
    assert without_option(words, "--gpus") == ["train", "run.yaml", "train.epochs=2", "--resume"]


@pytest.mark.parametrize(
    ("codes", "rank"),
    [
        ({1: 4, 0: 6}, 1),
        ({1: 2, 0: 2}, 0),  # one reason on all: rank 0 has printed it
        ({0: 6, 1: 4}, 1),  # a rank may notice before the one that failed has ended
        ({1: -9, 0: 6}, 1),
        ({1: -9, 0: 130}, 1),
        ({0: 6, 1: -9}, 0),  # one that hung, and was killed by the agent
        ({2: 130, 0: 130}, 2),
        ({1: 1, 0: -15}, 1),
    ],
)
def test_the_first_failure_is_that_of_a_rank_that_failed_by_itself(
    codes: dict[int, int], rank: int
) -> None:
    assert first_failure(codes) == rank


@pytest.mark.parametrize(
    ("code", "passed_on", "expected"),
    [(4, [], 4), (130, [], 130), (6, [], 6), (-9, [], 6), (-15, [15], 130), (-15, [2], 6)],
)
def test_the_code_of_all_is_that_of_the_first_failure(
    code: int, passed_on: list[int], expected: int
) -> None:
    assert exit_code(code, passed_on) == expected


def test_ranks_without_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "num_accelerators", lambda: 2)
    with pytest.raises(NoDevice, match=r"--gpus 3: torch finds 2 devices.*memory\.device=cpu"):
        launching.launch(3, [], "auto")


def test_a_rank_knows_its_place_and_stays_on_the_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    with launched(SLEEPS, tmp_path) as launcher:
        for rank, told in enumerate(launcher.ranks()):
            found = told["set"]
            assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == (str(rank),) * 2 + (
                "2",
            )
            assert found["MASTER_ADDR"] == "127.0.0.1"
            assert found["OMP_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"]
            assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_reach_every_rank_as_often_as_they_were_sent(name: str, tmp_path: Path) -> None:
    with launched(LISTENS, tmp_path, ends_at=2) as launcher:
        launcher.signal(signal.Signals[name])
        assert eventually(lambda: all(rank["told"] == [name] for rank in launcher.ranks()))
        launcher.signal(signal.Signals[name])
        assert launcher.end()[0] == 130
        assert [rank["told"] for rank in launcher.ranks()] == [[name, name]] * 2
        assert launcher.are_gone()


def test_ranks_that_do_not_listen_yet_end_as_interrupted(tmp_path: Path) -> None:
    with launched(SLEEPS, tmp_path) as launcher:
        launcher.signal(signal.SIGTERM)
        assert launcher.end() == (130, "")


def test_when_a_rank_fails_the_others_are_ended_and_its_code_is_kept(tmp_path: Path) -> None:
    with launched(ONE_FAILS, tmp_path) as launcher:
        assert launcher.end() == (4, "")
        assert launcher.are_gone()


def test_the_words_of_a_rank_that_failed_are_shown(tmp_path: Path) -> None:
    with launched(ONE_SAYS_WHY, tmp_path) as launcher:
        assert launcher.end() == (4, "rank 1: DiskFull: my disk is full\n")


def test_a_rank_that_does_not_end_is_killed(tmp_path: Path) -> None:
    with launched(DOES_NOT_END, tmp_path) as launcher:
        assert launcher.end() == (4, "")
        assert launcher.are_gone()


def test_a_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    with launched(SLEEPS, tmp_path) as launcher:
        os.kill(launcher.ranks()[1]["pid"], signal.SIGKILL)
        code, text = launcher.end()
        assert code == 6
        assert text.startswith("rank 1 was ended by SIGKILL. If that was not you, memory may have")
        assert launcher.are_gone()


def test_a_launcher_that_is_killed_leaves_no_rank_behind(tmp_path: Path) -> None:
    with launched(ENDS_WITH_LAUNCHER, tmp_path) as launcher:
        launcher.signal(signal.SIGKILL)
        assert eventually(launcher.are_gone)


def test_a_rank_that_does_not_ask_for_it_would_stay_behind(tmp_path: Path) -> None:
    """The sibling."""
    with launched(SLEEPS, tmp_path) as launcher:
        launcher.signal(signal.SIGKILL)
        launcher.process.wait(HANG_S)
        assert not launcher.are_gone()


def test_the_launcher_listens_on_the_loopback_only(tmp_path: Path) -> None:
    with launched(SLEEPS, tmp_path) as launcher:
        found = listeners(launcher.ranks()[0]["parent"])
        assert len(found) == 1
        assert {host for host, _ in found} <= LOOPBACK
