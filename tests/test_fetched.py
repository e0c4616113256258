"""Folders at URLs come into the cache once, whole, and again when they have changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain import fetched, hub
from megatrain.cache import writable_cache_folder
from megatrain.data.rows.source import open_source
from megatrain.errors import ModelFolderError, StorageError
from megatrain.fetched import local_path
from megatrain.places import FolderPlace, Place
from testkit.faulty_place import FaultyPlace


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyPlace:
    """The place of s3://bucket/things, and below it."""
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetched, "_RANGE_BYTES", 100)
    top = FaultyPlace(FolderPlace(tmp_path / "bucket"))

    def opened(url: str) -> Place:
        rest = url.removeprefix("s3://bucket").lstrip("/")
        below = FaultyPlace(FolderPlace(tmp_path / "bucket" / rest), top.fails)
        below.calls = top.calls
        return below

    monkeypatch.setattr(fetched, "open_place", opened)
    return top


def _reads(bucket: FaultyPlace) -> set[str]:
    found = {key for action, key in bucket.calls if action == "read"}
    bucket.calls.clear()
    return found


def test_what_is_in_the_cache_is_not_read_again(bucket: FaultyPlace) -> None:
    data = bytes(range(256)) * 3
    bucket.write("things/a.json", data)
    bucket.write("things/deep/b", b"")
    folder = local_path("s3://bucket/things")
    assert (folder / "a.json").read_bytes() == data
    assert (folder / "deep/b").read_bytes() == b""
    assert _reads(bucket) == {"a.json"}
    assert local_path("s3://bucket/things/") == folder == local_path(Path("s3://bucket/things"))
    assert _reads(bucket) == set()
    bucket.write("things/a.json", data[1:])
    changed = local_path("s3://bucket/things")
    assert changed != folder
    assert (changed / "a.json").read_bytes() == data[1:]


def test_a_fetch_that_fails_leaves_no_part_of_a_file(bucket: FaultyPlace) -> None:
    bucket.write("things/a", bytes(range(256)) * 3)
    bucket.fails = lambda number, action, key, is_done: action == "read" and number % 3 == 0
    with pytest.raises(StorageError, match="made to fail"):
        local_path("s3://bucket/things")
    bucket.fails = lambda *_: False
    assert (local_path("s3://bucket/things") / "a").read_bytes() == bytes(range(256)) * 3
    with pytest.raises(StorageError, match="s3://bucket/none: there is nothing here"):
        local_path("s3://bucket/none")


def test_an_object_that_is_replaced_during_a_fetch_is_refused(bucket: FaultyPlace) -> None:
    bucket.write("things/a", bytes(300))
    bucket.write("things/b", bytes(10))

    def replaces(number: int, action: str, key: str, is_done: bool) -> bool:
        if action == "read" and key == "b" and is_done:
            bucket.place.write("things/a", bytes(range(100)) * 3)
        return False

    bucket.fails = replaces
    with pytest.raises(StorageError, match=r"s3://bucket/things: a changed while it was fetched"):
        local_path("s3://bucket/things")
    assert not list(writable_cache_folder().rglob("[ab]"))
    bucket.fails = lambda *_: False
    assert (local_path("s3://bucket/things") / "a").read_bytes() == bytes(range(100)) * 3


def test_rows_and_models_are_read_from_urls(bucket: FaultyPlace) -> None:
    bucket.write("things/rows.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    source = open_source("s3://bucket/things/rows.jsonl")
    assert [value for _, value in source.values()]
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "x.py"):
        bucket.write(f"model/{name}", b"{}")
    bucket.calls.clear()
    folder = hub.find_model("s3://bucket/model", need="config").folder
    assert _reads(bucket) == {"config.json"}
    assert hub.find_model("s3://bucket/model").folder == folder
    assert _reads(bucket) == {"tokenizer.json", "model.safetensors"}
    bucket.write("run/history/00000001.json", b"{}")
    with pytest.raises(ModelFolderError, match="that of a run is s3://bucket/run/model"):
        hub.find_model("s3://bucket/run")
