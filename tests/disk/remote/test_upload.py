"""Uploads: the history names only what is there, and what did not change is not sent again."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain.disk.checkpoint.manifest import MANIFEST_NAME
from megatrain.disk.checkpoint.restore import verify
from megatrain.disk.remote import history, upload
from megatrain.disk.remote.download import bring, run_file
from megatrain.disk.remote.history import RemoteCheckpoint, last_entry, take
from megatrain.disk.remote.upload import HeldCheckpoint, Sent, Uploader, kept, read_index
from megatrain.errors import CheckpointCorrupted, MegaTrainError, RunTaken, StorageError
from megatrain.places import FolderPlace, Place
from proofs.crash.tiny import TinyRun
from testkit.faulty_os import recorded, volatile
from testkit.faulty_place import FaultyPlace


@pytest.fixture(autouse=True)
def _not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LEASE_S", 0.0)


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[TinyRun]:
    run = TinyRun(tmp_path / "run")
    yield run
    run.folder.close()


@pytest.fixture
def place(tmp_path: Path) -> FaultyPlace:
    return FaultyPlace(FolderPlace(tmp_path / "bucket"))


def _uploader(place: Place, keep: int = 1) -> Uploader:
    lease = take(place)
    lease.stop()  # no calls but those of the upload
    return Uploader(lease=lease, keep=keep, keep_best=False)


def _send(uploader: Uploader, tiny: TinyRun) -> Sent:
    with HeldCheckpoint(tiny.save(), tiny.folder.path) as held:
        return uploader.upload(held)


def test_a_chunk_that_was_sent_leaves_no_memory_behind(
    tiny: TinyRun, place: FaultyPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []
    write = FolderPlace.write

    def writing(self: FolderPlace, key: str, data: bytes | memoryview) -> None:
        if key.startswith("chunks/"):
            assert isinstance(data, memoryview)
            given.append(data.obj)
        write(self, key, data)

    monkeypatch.setattr(FolderPlace, "write", writing)
    _send(_uploader(place), tiny)
    assert given
    assert all(isinstance(one, mmap.mmap) for one in given)  # the system has it back at once


def _newest(place: Place, scratch: Path) -> int:
    """Return the step that an empty machine gets, 0 if the bucket has none. Raises if damaged."""
    last = last_entry(place)
    if last is None or not last.live:
        return 0
    scratch.mkdir(exist_ok=True)
    for one in last.live:
        assert verify(bring(place, one, scratch / "checkpoints", scratch)).step == one.step
    return last.live[0].step


def test_an_empty_machine_gets_what_was_saved(
    tiny: TinyRun, place: FaultyPlace, tmp_path: Path
) -> None:
    tiny.take_step()
    _send(_uploader(place), tiny)
    other = TinyRun(tmp_path / "empty")
    assert _newest(place, tmp_path / "empty") == 1
    assert other.take_up() == 1
    assert other.holds(1)
    for name in ("metrics.jsonl", "samples.jsonl"):
        expected = (tiny.folder.path / name).read_bytes()
        assert (tmp_path / "empty" / name).read_bytes() == expected == run_file(place, name)
    other.folder.close()


def test_what_is_brought_is_durable_before_its_manifest(
    tiny: TinyRun, place: FaultyPlace, tmp_path: Path
) -> None:
    tiny.take_step()
    _send(_uploader(place), tiny)
    last = last_entry(place)
    assert last is not None
    with recorded() as changes:
        folder = bring(place, last.live[0], tmp_path / "empty", None)
    assert volatile(changes, until=folder / MANIFEST_NAME) == set()
    assert volatile(changes) == set()


def test_two_processes_never_write_the_same_chunk(tiny: TinyRun, place: FaultyPlace) -> None:
    """One that was taken over may still write and delete: under names of its own."""
    tiny.take_step()
    folder = tiny.save()
    place.fails = lambda n, action, *_: action == "write_new" and n > 2
    slept, sent = _uploader(place), []
    for uploader in (slept, None):
        with HeldCheckpoint(folder, tiny.folder.path) as held:
            try:
                (uploader or _uploader(place)).upload(held)
            except StorageError:  # before it was acknowledged
                place.fails = lambda *_: False
        sent.append({key for key in place.sent if key.startswith("chunks/")})
        place.sent.clear()
    digests = [{key.rpartition("/")[2] for key in keys} for keys in sent]
    assert digests[0] == digests[1]  # the same bytes
    assert not sent[0] & sent[1]


def test_a_process_that_learns_that_it_was_taken_over_deletes_nothing_more(
    tiny: TinyRun, place: FaultyPlace
) -> None:
    uploader = _uploader(place)
    tiny.take_step()
    _send(uploader, tiny)
    deleted = []

    def taken(number: int, action: str, key: str, is_done: bool) -> bool:
        if action == "delete" and is_done:
            deleted.append(key)
            uploader.lease.lost = "another process has the run"
        return False

    place.fails = taken
    tiny.take_step()
    tiny.fill(1)
    with pytest.raises(RunTaken):
        _send(uploader, tiny)
    assert len(deleted) == 1


def test_files_that_people_put_into_a_run_folder_go_along_and_stop_no_resume(
    tiny: TinyRun, place: FaultyPlace, tmp_path: Path
) -> None:
    for name in ("my notes (2).txt", "r\u00e9sum\u00e9..md", "two\nlines", "back\\slash"):
        (tiny.folder.path / name).write_text(name)
    tiny.take_step()
    _send(_uploader(place), tiny)
    assert _newest(place, tmp_path / "empty") == 1
    found = {path.name for path in (tmp_path / "empty").iterdir()}
    assert {"my notes (2).txt", "r\u00e9sum\u00e9..md"} <= found
    assert not {"two\nlines", "back\\slash"} & found


@pytest.mark.parametrize("name", ["../up", "a/b", ".ssh", "/etc/x", "a\nb", ""])
def test_no_name_of_a_bucket_leads_out_of_the_run_folder(
    tiny: TinyRun, place: FaultyPlace, tmp_path: Path, name: str
) -> None:
    tiny.take_step()
    uploader = _uploader(place)
    with HeldCheckpoint(tiny.save(), tiny.folder.path) as held:
        held.files[f"run/{name}"] = held.files["run/metrics.jsonl"]
        uploader.upload(held)
    with pytest.raises(CheckpointCorrupted, match="is not a file of a checkpoint"):
        _newest(place, tmp_path / "empty")
    assert not (tmp_path / "up").exists()


def test_what_did_not_change_is_not_sent_again(
    tiny: TinyRun, place: FaultyPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader = _uploader(place)
    tiny.take_step()
    first = _send(uploader, tiny)
    lines = tiny.folder.lengths()["samples.jsonl"]
    assert first.known_bytes == lines  # metrics.jsonl has the same
    tiny.take_step()
    tiny.fill(1)  # one tensor is all that changes
    tensor = tiny.tensors()[0]
    tensor.memory.add_(1)
    place.sent.clear()
    second = _send(uploader, tiny)
    last = last_entry(place)
    assert last is not None
    index = read_index(place, last.live[0])
    changed = {
        f"checkpoint/{tiny.parts.blocks[0][0].name}",
        f"checkpoint/{MANIFEST_NAME}",
        "run/metrics.jsonl",
        "run/samples.jsonl",
    }
    sent = {key for name in changed for key in index[name].chunk_keys()}
    assert set(place.sent) == {*sent, last.live[0].key, f"history/{last.number:08}.json"}
    assert second.num_bytes == sum(n for key, n in place.sent.items() if "history" not in key)
    again = _uploader(place)  # another process knows it from the bucket
    place.sent.clear()
    tiny.take_step()
    tiny.fill(1)
    tensor.memory.add_(1)
    third = _send(again, tiny)
    more = tiny.parts.blocks[0][0].num_bytes + tiny.folder.lengths()["samples.jsonl"] - 2 * lines
    assert third.known_bytes == second.known_bytes + more
    monkeypatch.setattr(Uploader, "_learn", lambda self: None)
    tiny.take_step()
    assert _send(_uploader(place), tiny).known_bytes < 1000  # the test would notice


@pytest.mark.merge
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_a_failure_at_any_call_loses_and_mixes_nothing(tmp_path: Path, is_done: bool) -> None:
    number, num_calls, num_failed = 1, 1, 0
    while number <= num_calls:
        folder = tmp_path / str(number)
        tiny, place = TinyRun(folder / "run"), FaultyPlace(FolderPlace(folder / "bucket"))
        acknowledged = 0
        place.fails = lambda n, *rest: n == number and rest[-1] == is_done  # noqa: B023
        uploader = None
        for _ in range(3):
            try:
                uploader = uploader or _uploader(place)
                tiny.take_step()
                _send(uploader, tiny)
                acknowledged = tiny.step
            except MegaTrainError:
                num_failed += 1
            num_calls = max(num_calls, len(place.calls))
            place_now = FolderPlace(folder / "bucket")
            assert _newest(place_now, folder / f"empty-{tiny.step}") >= acknowledged
        tiny.folder.close()
        number += 1
    assert 15 < num_failed <= num_calls  # deletes fail unnoticed


def test_the_laws_would_notice_an_entry_before_its_chunks(
    tiny: TinyRun, place: FaultyPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = upload.each_done

    def later(work: dict[str, object]) -> Iterator[tuple[str, int]]:
        yield from ((name, 1) for name in work)

    monkeypatch.setattr(upload, "each_done", later)
    tiny.take_step()
    _send(_uploader(place), tiny)
    monkeypatch.setattr(upload, "each_done", real)
    with pytest.raises(CheckpointCorrupted, match="is missing"):
        _newest(place, tmp_path / "empty")


def test_what_is_kept_and_what_nobody_needs(tiny: TinyRun, place: FaultyPlace) -> None:
    killed = _uploader(place)
    tiny.take_step()
    place.fails = lambda n, action, *_: action == "write_new"
    with pytest.raises(StorageError):
        _send(killed, tiny)  # its chunks are nobody's
    place.fails = lambda *_: False
    uploader = _uploader(place, keep=2)
    for _ in range(4):
        tiny.take_step()
        _send(uploader, tiny)
    last = last_entry(place)
    assert last is not None
    assert [one.step for one in last.live] == [5, 4]
    lists = [read_index(place, one) for one in last.live]
    needed = {key for files in lists for file in files.values() for key in file.chunk_keys()}
    assert {one.key for one in place.listed("chunks")} == needed
    assert {one.key for one in place.listed("checkpoints")} == {one.key for one in last.live}


def test_bytes_that_have_changed_on_this_disk_are_not_sent(
    tiny: TinyRun, place: FaultyPlace
) -> None:
    tiny.take_step()
    path = tiny.save()
    uploader = _uploader(place)
    weights = path / tiny.parts.blocks[0][0].name
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with (
        HeldCheckpoint(path, tiny.folder.path) as held,
        pytest.raises(CheckpointCorrupted, match="are not uploaded"),
    ):
        uploader.upload(held)


def test_a_checkpoint_that_is_deleted_meanwhile_is_sent(
    tiny: TinyRun, place: FaultyPlace, tmp_path: Path
) -> None:
    tiny.take_step()
    with HeldCheckpoint(tiny.save(), tiny.folder.path) as held:
        tiny.take_step()
        tiny.save()
        assert tiny.prune() == [held.folder.name]
        _uploader(place).upload(held)
    assert _newest(place, tmp_path / "empty") == 1


def test_a_chunk_that_changed_in_the_bucket_is_named(
    tiny: TinyRun, place: FaultyPlace, tmp_path: Path
) -> None:
    tiny.take_step()
    _send(_uploader(place), tiny)
    key = max(place.listed("chunks"), key=lambda one: one.num_bytes).key
    data = place.read(key)
    assert data is not None
    place.write(key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointCorrupted, match=f"{key} does not match its hash"):
        _newest(place, tmp_path / "empty")
    assert not list((tmp_path / "empty").rglob(MANIFEST_NAME))


def test_the_newest_and_the_best_are_kept() -> None:
    def one(step: int, loss: float | None, lease: int = 1) -> RemoteCheckpoint:
        return RemoteCheckpoint(
            name=f"step-{step}", step=step, lease=lease, sha256="", eval_loss=loss
        )

    new, old = one(9, 3.0), [one(8, 2.0), one(7, 1.0), one(6, None)]
    assert kept([new, *old], 1, keep_best=False) == (new,)
    assert kept([new, *old], 2, keep_best=True) == (new, old[0], old[1])
    assert kept([one(7, 4.0, lease=2), *old], 2, keep_best=False) == (old[0], one(7, 4.0, lease=2))
