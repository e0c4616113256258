"""Places: objects are whole or absent, and one of many makes a new one."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatrain.errors import ConfigError, MissingPackage, StorageError
from megatrain.places import (
    BucketPlace,
    FolderPlace,
    Place,
    is_url,
    open_place,
)
from testkit.listening import listening


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "folder":
        return open_place(f"file://{tmp_path}/place")
    store = pytest.importorskip("obstore.store", reason="obstore is not installed")
    memory = store.MemoryStore()
    monkeypatch.setattr("megatrain.places._opened", lambda scheme, bucket: memory)
    return open_place("s3://bucket/place")


def test_objects_are_read_as_they_were_written(place: Place, tmp_path: Path) -> None:
    assert place.read("a/b") is None
    place.write("a/b", b"some bytes")
    place.write("c d.jsonl", b"")
    (tmp_path / "file").write_bytes(bytes(range(256)) * 100)
    place.send("e", tmp_path / "file")
    assert place.read("a/b") == b"some bytes"
    assert place.read("a/b", range(5, 7)) == b"by"
    assert place.read("e", range(300, 303)) == bytes([44, 45, 46])
    assert [(one.key, one.num_bytes) for one in place.listed()] == [
        ("a/b", 10),
        ("c d.jsonl", 0),
        ("e", 25600),
    ]
    assert [one.key for one in place.listed("a")] == ["a/b"]
    place.delete("a/b")
    place.delete("a/b")
    assert place.read("a/b") is None
    assert place.listed("a") == []


def test_a_listing_leaves_out_files_that_go_away_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the temporary file of a writer does, and a folder that somebody removes."""
    place = FolderPlace(tmp_path)
    for key in ("a", "b", "c/d"):
        place.write(key, b"1")
    stat, scandir = Path.stat, os.scandir

    def gone(path: Path, **options: bool) -> os.stat_result:
        if path.name == "a":
            path.unlink()
        return stat(path, **options)

    def removed(path: str) -> Iterator[os.DirEntry[str]]:
        if path.endswith("/c"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return scandir(path)

    monkeypatch.setattr(Path, "stat", gone)
    monkeypatch.setattr(os, "scandir", removed)
    assert [one.key for one in place.listed()] == ["b"]


def test_a_folder_that_cannot_be_read_is_no_empty_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(StorageError, match=f"cannot list {tmp_path}: Permission denied"):
        FolderPlace(tmp_path).listed()


def test_one_of_many_makes_a_new_object(place: Place) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda n: place.write_new("lock", str(n).encode()), range(12)))
    assert sum(made) == 1
    assert place.read("lock") == str(made.index(True)).encode()


@pytest.mark.parametrize("keeps", [True, False])
def test_storage_that_replaces_what_it_must_keep_is_refused(
    monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """As storage that is like S3 and does not know If-None-Match."""
    refusal = type("AlreadyExistsError", (Exception,), {})
    objects: dict[str, bytes] = {}
    calls: list[str] = []

    def put(store: object, key: str, data: bytes, **_: object) -> None:
        calls.append(key)
        if keeps and key in objects:
            raise refusal
        objects[key] = data

    named = {"AlreadyExistsError": refusal, "PreconditionError": refusal}
    exceptions = SimpleNamespace(**named)
    monkeypatch.setitem(sys.modules, "obstore", SimpleNamespace(put=put, exceptions=exceptions))
    monkeypatch.setitem(sys.modules, "obstore.exceptions", exceptions)
    monkeypatch.setattr("megatrain.places._opened", lambda scheme, bucket: None)
    place = open_place("s3://bucket/run")
    if keeps:
        assert [place.write_new(key, b"1") for key in ("a", "a", "b", "b")] == [True, False] * 2
        assert calls == ["run/a", "run/a", "run/a", "run/b", "run/b"]
        return
    with pytest.raises(ConfigError, match=r"s3://bucket/run: this storage replaces objects"):
        place.write_new("a", b"1")


@pytest.mark.parametrize("key", ["../up", "a/../../up", "/root", ".hidden", "a//b", "", "a\\b"])
def test_no_key_leads_out_of_a_place(place: Place, key: str) -> None:
    with pytest.raises(StorageError, match="not a name for an object"):
        place.write(key, b"")


def test_urls_are_told_from_paths() -> None:
    for url in ("s3://bucket/run", "gs://b", "az://c/x", "file:///x"):
        assert is_url(url)
    for name in ("runs/mine", "Qwen/Qwen3-8B", "C:/x", "http://x", "hf://a/b", "s3://"):
        assert not is_url(name)
    for url in ("ftp://x/y", "s3:///x", "file://x", "runs/mine"):
        with pytest.raises(ConfigError, match="not a place"):
            open_place(url)


def test_buckets_without_obstore_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(MissingPackage, match=r"pip install megatrain\[bucket\]"):
        BucketPlace("s3", "bucket", "run")


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A bucket that has nothing, and by whom each request was signed; a profile of AWS."""
    signed: list[str] = []

    class Bucket(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            signed.append(self.headers["Authorization"].partition("Credential=")[2].split("/")[0])
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    keys = "[team]\naws_access_key_id = TEAM\naws_secret_access_key = s\n"
    (tmp_path / "credentials").write_text(keys)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with listening(Bucket) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield signed


def test_a_profile_signs_unless_variables_do(
    heard: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    pytest.importorskip("boto3", reason="boto3 is not installed")
    monkeypatch.setenv("AWS_PROFILE", "team")
    assert open_place("s3://bucket/run").read("a") is None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "MINE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert open_place("s3://bucket/run").read("a") is None
    assert heard == ["TEAM", "MINE"]


@pytest.mark.usefixtures("heard")
def test_a_profile_that_is_not_there_or_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "boto3", None)
        patch.delitem(sys.modules, "obstore.auth.boto3", raising=False)
        with pytest.raises(MissingPackage, match="pip install boto3"):
            open_place("s3://bucket/run")
    pytest.importorskip("boto3", reason="boto3 is not installed")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match=r"s3://bucket: .*nobody"):
        open_place("s3://bucket/run")
