"""A lost rank is named, and no process stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from megatrain.errors import DataError, RankLost
from megatrain.ranks.ownership import Owner
from megatrain.ranks.watch import Watch
from testkit.patience import HANG_S, eventually
from testkit.warm_python import warm_python

LONG_S = 1e6
"""A deadline that no test reaches; heartbeats come every second."""
SHORT_S = 2.0


class Process:
    """A rank whose process is an object: what hangs in it, and how it was ended."""

    def __init__(self, store: Store, rank: int, size: int, deadline_s: float) -> None:
        self.ended: list[tuple[str, int]] = []
        self.watch = Watch(
            store,
            Owner(rank, size),
            deadline_s,
            end=lambda text, code: self.ended.append((text, code)),
        )

    def is_told(self) -> bool:
        """Return whether this rank knows of a loss."""
        try:
            self.watch.begin("comm", "gather")
        except RankLost:
            return True
        return False


class Cuttable:
    """A store whose calls hang once it is cut off."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.is_whole = threading.Event()
        self.is_whole.set()

    def clone(self) -> Store:
        return self  # type: ignore[return-value]

    def __getattr__(self, name: str) -> object:
        self.is_whole.wait(HANG_S)
        return getattr(self._store, name)


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def pair(store: HashStore) -> Iterator[list[Process]]:
    cut = Cuttable(store)
    ranks = [Process(store, 0, 2, SHORT_S), Process(cut, 1, 2, SHORT_S)]  # type: ignore[arg-type]
    ranks[1].cut = cut  # type: ignore[attr-defined]
    yield ranks
    cut.is_whole.set()


def test_a_rank_that_failed_is_named_with_its_error(pair: list[Process]) -> None:
    pair[1].watch.fail(DataError("rows.jsonl:7: no tokens"))
    found = pair[0].watch.diagnose(RuntimeError("Connection closed by peer"))
    assert isinstance(found, RankLost)
    assert f"rank 1 ({os.uname().nodename}, pid {os.getpid()}) failed: DataError" in str(found)
    assert "rows.jsonl:7: no tokens" in str(found)


def test_the_error_is_heard_without_any_collective(pair: list[Process]) -> None:
    """Then what begins is refused, and what hangs is ended."""
    pair[1].watch.fail(DataError("row 7"))
    assert eventually(pair[0].is_told)
    with pytest.raises(RankLost, match="row 7"):
        pair[0].watch.begin("comm", "gather")
    assert eventually(lambda: pair[0].ended and pair[1].ended)
    assert "row 7" in pair[0].ended[0][0]
    assert pair[0].ended[0][1] == RankLost.exit_code
    assert pair[1].ended == [("DataError: row 7", DataError.exit_code)]


def test_rank_0_fails_only_once_its_error_was_read() -> None:
    """For the store may end with it."""
    server = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False)]
    ranks = [
        Process(TCPStore("localhost", server[0].port, wait_for_workers=False), rank, 3, SHORT_S)
        for rank in range(3)
    ]
    assert eventually(lambda: all(len(rank.watch._joined) == 2 for rank in ranks))
    ranks[0].watch.fail(DataError("row 7"))
    server.clear()
    for rank in ranks[1:]:
        with pytest.raises(RankLost, match="row 7"):
            raise rank.watch.diagnose(RuntimeError("Connection closed by peer"))


@pytest.mark.merge
def test_a_silent_rank_is_found_and_so_is_the_store_by_who_is_cut_off(pair: list[Process]) -> None:
    assert eventually(lambda: 1 in pair[0].watch._joined)
    pair[1].cut.is_whole.clear()  # type: ignore[attr-defined]
    assert eventually(lambda: pair[0].ended and pair[1].ended)
    assert "rank 1" in pair[0].ended[0][0]
    assert "dead or cut off" in pair[0].ended[0][0]
    assert "store is gone or cut off" in pair[1].ended[0][0]


def test_a_silence_within_the_deadline_is_borne(store: HashStore) -> None:
    cut = Cuttable(store)
    ranks = [Process(store, 0, 2, LONG_S), Process(cut, 1, 2, LONG_S)]  # type: ignore[arg-type]
    assert eventually(lambda: ranks[0].watch._joined and ranks[1].watch._joined)
    cut.is_whole.clear()
    time.sleep(1.5)
    cut.is_whole.set()
    for rank in ranks:
        rank.watch.begin("comm", "gather")
        rank.watch.close()


def test_words_of_a_stranger_are_not_heard_and_those_of_a_rank_still_are(
    pair: list[Process], store: HashStore
) -> None:
    assert eventually(lambda: pair[0].watch._joined and pair[1].watch._joined)
    for _ in range(20):
        store.set("watch/rank 1", "cos\nmkdir\n(Vhere\ntR.")
        pair[0].watch._hear()
    assert not pair[0].is_told()
    pair[1].watch.fail(DataError("row 7"))
    assert eventually(pair[0].is_told)
    with pytest.raises(RankLost, match="row 7"):
        pair[0].watch.begin("comm", "gather")


def test_a_store_that_dies_is_told_at_once() -> None:
    server = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False)]
    client = TCPStore("localhost", server[0].port, wait_for_workers=False)
    other = Process(client, 1, 2, LONG_S)
    assert eventually(lambda: server[0].check(["watch/rank 1"]))
    server.clear()
    assert eventually(other.is_told)
    with pytest.raises(RankLost, match="store is gone or cut off"):
        other.watch.begin("share", "agree")
    other.watch.close()


@pytest.mark.merge
def test_who_leaves_is_not_missed(store: HashStore) -> None:
    ranks = [Process(store, rank, 2, SHORT_S) for rank in range(2)]
    assert eventually(lambda: ranks[0].watch._joined and ranks[1].watch._joined)
    ranks[1].watch.close()
    time.sleep(2 * SHORT_S)
    assert not ranks[0].is_told()
    ranks[0].watch.close()
    assert ranks[0].ended == ranks[1].ended == []


HANGS = """
import sys, threading
from torch.distributed import TCPStore
from megatrain.ranks.ownership import Owner
from megatrain.ranks.watch import Watch
store = TCPStore("localhost", int(sys.argv[1]), wait_for_workers=False)
watch = Watch(store, Owner(int(sys.argv[2]), 2), float(sys.argv[3]))
watch.begin("comm", "gather")
print("hangs", flush=True)
threading.Thread(target=threading.Event().wait).start()
threading.Event().wait()
"""


@pytest.mark.merge
def test_no_process_that_hangs_stays_behind() -> None:
    """Of two that hang for ever, one is stopped: the other names it and ends; then it ends too."""
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [*warm_python().command, "-c", HANGS, str(server.port), str(rank), str(SHORT_S)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "hangs\n"
    assert eventually(lambda: server.check(["watch/rank 0", "watch/rank 1"]))
    pid = json.loads(server.get("watch/rank 1"))["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        _, told = ranks[0].communicate(timeout=HANG_S)
        assert ranks[0].returncode == RankLost.exit_code
        assert f"pid {pid}) is dead or cut off" in told
        assert "doing: " not in told
    finally:
        os.kill(pid, signal.SIGCONT)
    _, told = ranks[1].communicate(timeout=HANG_S)
    assert ranks[1].returncode == RankLost.exit_code
    assert "rank 0" in told
