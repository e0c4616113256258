"""The history of a run: one process writes, and one that was taken over adds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.disk.remote import history
from megatrain.disk.remote.history import RemoteCheckpoint, last_entry, take
from megatrain.errors import CheckpointCorrupted, RunFolderError, RunTaken, StorageError
from megatrain.places import FolderPlace
from testkit.faulty_place import FaultyPlace


def _checkpoint(step: int) -> RemoteCheckpoint:
    return RemoteCheckpoint(name=f"step-{step:08}-00000000", step=step, lease=1, sha256="0" * 64)


@pytest.fixture
def place(tmp_path: Path) -> FolderPlace:
    return FolderPlace(tmp_path / "bucket")


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BEAT_S", 0.02)
    monkeypatch.setattr(history, "LEASE_S", 0.5)


def test_the_last_entry_is_found_by_reading_alone(place: FolderPlace) -> None:
    assert last_entry(place) is None
    lease = take(place)
    for step in range(1, 20):
        lease.commit((_checkpoint(step),))
        found = last_entry(FaultyPlace(place, lambda n, action, *_: action == "listed"))
        assert found is not None
        assert (found.number, found.live) == (step + 1, (_checkpoint(step),))
    lease.release()


@pytest.mark.usefixtures("short_lease")
def test_a_live_process_keeps_its_run(place: FolderPlace) -> None:
    lease = take(place)
    with pytest.raises(RunFolderError, match=r"process \d+ on .* is writing this run"):
        take(place)
    lease.release()
    take(place).release()


@pytest.mark.usefixtures("short_lease")
def test_a_process_without_a_beat_is_taken_over_and_adds_nothing(place: FolderPlace) -> None:
    slept = take(place)
    slept.commit((_checkpoint(1),))
    slept.stop()
    said: list[str] = []
    taken = take(place, say=said.append)
    assert taken.live == (_checkpoint(1),)
    assert "waiting 0 s for a sign of life" in said[0] or "waiting 1 s" in said[0]
    with pytest.raises(RunTaken, match="has taken this run over"):
        slept.commit((_checkpoint(2),))
    taken.commit((_checkpoint(3),))
    with pytest.raises(RunTaken):
        slept.commit((_checkpoint(4),))
    found = last_entry(place)
    assert found is not None
    assert found.live == (_checkpoint(3),)
    taken.release()


def test_a_process_of_this_machine_that_is_gone_is_not_waited_for(
    place: FolderPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = history.this_process() | {"pid": 1 << 30}
    with monkeypatch.context() as patch:
        patch.setattr(history, "this_process", lambda: gone)
        take(place).stop()
    take(place, pause=lambda _: pytest.fail("it waits")).release()


def test_of_two_processes_one_takes_a_run(place: FolderPlace) -> None:
    """The other one comes between the look at the last entry and the put."""
    other: list[history.Lease] = []

    def comes_between(number: int, action: str, key: str, is_done: bool) -> bool:
        if action == "write_new" and not other:
            other.append(take(place))
        return False

    with pytest.raises(RunFolderError, match="is writing this run"):
        take(FaultyPlace(place, comes_between))
    other[0].release()


@pytest.mark.parametrize("is_done", [False, True], ids=["put lost", "answer lost"])
def test_a_put_that_fails_is_one_entry_when_it_is_tried_again(
    place: FolderPlace, is_done: bool
) -> None:
    failing = [True]

    def fails(number: int, action: str, key: str, done: bool) -> bool:
        return action == "write_new" and "00000002" in key and done == is_done and failing[0]

    lease = take(FaultyPlace(place, fails))
    with pytest.raises(StorageError):
        lease.commit((_checkpoint(1),))
    failing[0] = False
    lease.commit((_checkpoint(1),))
    lease.commit((_checkpoint(2),))
    found = last_entry(place)
    assert found is not None
    assert found.live == (_checkpoint(2),)
    lease.release()


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"live": [{}]}', b"\xff", b"[" * 10**5])
def test_an_entry_that_is_none_is_damage(place: FolderPlace, data: bytes) -> None:
    place.write("history/00000001.json", data)
    with pytest.raises(CheckpointCorrupted, match="not an entry of a run"):
        last_entry(place)


def test_a_place_that_answers_with_another_entry_is_named_at_once(place: FolderPlace) -> None:
    """As a cache in between may; one that has an entry for every number must not be asked on."""
    take(place).release()
    first = place.read("history/00000001.json") or b""
    place.write("history/00000002.json", first)
    with pytest.raises(CheckpointCorrupted, match=r"00000002\.json: .* it is another one"):
        last_entry(place)
    forged = first.replace(b'"lease": 1', b'"lease": "x"')
    assert forged != first
    place.write("history/00000001.json", forged)
    with pytest.raises(CheckpointCorrupted, match="its numbers are none"):
        last_entry(place)
