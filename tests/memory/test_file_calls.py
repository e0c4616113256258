"""A file call that hangs is named and left behind, and nothing is done after it in its name."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain.errors import DiskFull, StorageTimeout
from megatrain.files import explained
from megatrain.memory.file_calls import FileCalls
from testkit.patience import HANG_S, eventually
from testkit.warm_python import warm_python

LIMIT_S = 0.2


class Hanging:
    """A file call that returns when it is let go."""

    def __init__(self, path: Path) -> None:
        self._path, self.let_go = path, threading.Event()

    def __call__(self) -> str:
        with explained("write", self._path):
            self.let_go.wait(HANG_S)
        return "late"


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Hanging]:
    call = Hanging(tmp_path / "file")
    yield call
    call.let_go.set()


def test_a_call_that_hangs_is_named_with_host_and_file(hanging: Hanging, tmp_path: Path) -> None:
    calls = FileCalls(LIMIT_S)
    with pytest.raises(StorageTimeout) as found:
        calls.result(calls.submit(hanging))
    said = f"storage has stalled on {socket.gethostname()}: write {tmp_path / 'file'} has not "
    assert str(found.value) == f"{said}returned within 0.2 s"
    assert calls.out is not None
    assert calls.out.startswith(f"{said}returned for ")
    with pytest.raises(StorageTimeout):
        calls.do(lambda: None)
    calls.close()
    hanging.let_go.set()
    assert eventually(lambda: calls.out is None)


def test_results_and_errors_come_as_they_are() -> None:
    def full() -> None:
        raise DiskFull("no room")

    for limit_s in (None, 60.0):
        calls = FileCalls(limit_s)
        assert calls.result(calls.submit(lambda: 7)) == calls.do(lambda: 7) == 7
        with pytest.raises(DiskFull, match="no room"):
            calls.do(full)
        with pytest.raises(DiskFull, match="no room"):
            calls.result(calls.submit(full))
        calls.drain()
        calls.close()
        assert calls.out is None


@pytest.mark.merge
def test_work_of_many_calls_may_take_longer_than_the_limit(tmp_path: Path) -> None:
    """The limit is for one call; and the sibling, one call that takes as long, is too slow."""

    def work(num_calls: int) -> None:
        for _ in range(num_calls):
            with explained("write", tmp_path):
                time.sleep(2.0 / num_calls)

    FileCalls(1.0).do(lambda: work(40))
    with pytest.raises(StorageTimeout):
        FileCalls(1.0).do(lambda: work(1))


def test_nothing_is_begun_after_it_and_what_cleans_up_waits_for_it(hanging: Hanging) -> None:
    calls, done = FileCalls(LIMIT_S, num_threads=1), list[str]()
    first = calls.submit(hanging)
    second = calls.submit(lambda: done.append("never"), lambda: done.append("dropped"))
    with pytest.raises(StorageTimeout):
        calls.result(first)
    calls.afterwards(lambda: done.append("cleaned"))
    calls.close()
    assert done == []
    hanging.let_go.set()
    assert eventually(lambda: calls.out is None)
    assert sorted(done) == ["cleaned", "dropped"]
    with pytest.raises(StorageTimeout):
        second.result()


def test_a_result_that_comes_too_late_is_undone(hanging: Hanging) -> None:
    calls, undone = FileCalls(LIMIT_S), list[str]()
    assert calls.do(lambda: "in time", undone.append) == "in time"
    with pytest.raises(StorageTimeout):
        calls.do(hanging, undone.append)
    assert undone == []
    hanging.let_go.set()
    assert eventually(lambda: calls.out is None)
    assert undone == ["late"]


HANGS = """
import threading
from megatrain.errors import StorageTimeout
from megatrain.memory.file_calls import FileCalls
calls = FileCalls(0.1)
try:
    calls.result(calls.submit(threading.Event().wait))
except StorageTimeout:
    print("stalled")
"""


@pytest.mark.merge
def test_a_process_ends_although_a_call_of_it_hangs() -> None:
    done = subprocess.run(
        [*warm_python().command, "-c", HANGS],
        capture_output=True, text=True, timeout=HANG_S, check=True,
    )  # fmt: skip
    assert done.stdout == "stalled\n"
