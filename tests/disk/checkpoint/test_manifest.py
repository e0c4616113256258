"""Laws of manifest.py: foreign bytes are a manifest or an error of ours, and no byte may change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.disk.checkpoint import manifest as manifest_module
from megatrain.disk.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    parse_manifest,
    read_manifest,
    signed,
)
from megatrain.errors import CheckpointCorrupted, CheckpointMismatch, DiskError
from megatrain.memory.direct import CHUNK_BYTES

HASH = "0123456789abcdef" * 2
TRAINING: dict[str, Any] = {
    "loss": 0.30000000000000004, "small": 1e-05, "none": None, "nan_free": [1, 2.5, True],
    "text": "\u00e9\ud800 \x00\n\"", "deep": {"a": [{"b": {}}]}, "big": 1 << 80,
}  # fmt: skip


def _manifest(**changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "step": 7,
        "files": {
            "model/config.json": FileRecord(num_bytes=10, digests=(HASH,)),
            "state/block-00000.safetensors": FileRecord(
                num_bytes=CHUNK_BYTES + 1, digests=(HASH, HASH)
            ),
            "model/empty": FileRecord(num_bytes=0, digests=()),
        },
        "model": "mark",
        "training": TRAINING,
    }
    return Manifest(**fields | changes)


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(_manifest().to_bytes())
    del fields["sha256"]
    return fields


def _resigned(fields: Any) -> bytes:
    return signed(json.dumps(fields, indent=1).encode())


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(_manifest().to_bytes())
    assert read_manifest(tmp_path) == _manifest()
    assert _manifest().num_bytes == CHUNK_BYTES + 11


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
))  # fmt: skip
@settings(max_examples=100)
def test_whatever_the_trainer_says_comes_back(value: Any) -> None:
    made = _manifest(training={"value": value})
    assert parse_manifest(made.to_bytes(), "x") == made


def test_any_flipped_bit_is_refused() -> None:
    data = _manifest().to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises(CheckpointCorrupted, match="x has changed since it was written"):
                parse_manifest(bytes(changed), "x")


def test_cut_doubled_and_mixed_manifests_are_refused() -> None:
    data, other = _manifest().to_bytes(), _manifest(step=8).to_bytes()
    bad = [data[:stop] for stop in range(len(data))]
    bad += [data + data, data + b"\n", b" " + data, data[:200] + other[200:], b"{}", b""]
    bad += [other[:-80] + data[-80:]]
    for changed in bad:
        with pytest.raises(CheckpointCorrupted):
            parse_manifest(changed, "x")


def test_a_reader_without_the_hash_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = _manifest().to_bytes().replace(b'"step": 7', b'"step": 8')
    monkeypatch.setattr(manifest_module, "signed", lambda body: data)
    assert parse_manifest(data, "x").step == 8


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("step",), -1, "'-1' is not a count"),
        (("step",), True, "'True' is not a count"),
        (("step",), 1.0, "is not a count"),
        (("model",), None, "is not text"),
        (("training",), [], "is not an object"),
        (("files",), [], "is not an object"),
        (("files", "model/../x"), {}, "is not a file of a checkpoint"),
        (("files", "/etc/passwd"), {}, "is not a file of a checkpoint"),
        (("files", "model/a/b"), {}, "is not a file of a checkpoint"),
        (("files", "model/config.json", "digests"), 5, "invalid hash"),
        (("files", "model/config.json", "digests"), [HASH.upper()], "invalid hash"),
        (("files", "model/config.json", "digests"), [[HASH]], "invalid hash"),
        (("files", "model/config.json", "digests"), [], "the number of hashes and chunks differs"),
        (
            ("files", "model/config.json", "num_bytes"),
            10**30,
            "the number of hashes and chunks differs",
        ),
        (("files", "model/config.json"), None, "is not an object"),
    ],
)
def test_what_someone_signed_is_checked_all_the_same(
    path: tuple[str, ...], value: Any, text: str
) -> None:
    fields = _fields()
    holder = fields
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(CheckpointCorrupted, match=f"x is not a manifest: .*{text}"):
        parse_manifest(_resigned(fields), "x")


@pytest.mark.parametrize("key", ["step", "model", "training", "files"])
def test_a_missing_field_is_damage(key: str) -> None:
    fields = _fields()
    del fields[key]
    with pytest.raises(CheckpointCorrupted, match=f"is not a manifest: '{key}'"):
        parse_manifest(_resigned(fields), "x")


@pytest.mark.parametrize("change", [{"schema": 2}, {"schema": None}, {"chunk_bytes": 4096}])
def test_another_format_is_refused_with_the_way_out(change: dict[str, Any]) -> None:
    expected = r"another format \(.*; this version of MegaTrain reads 1\)\. Use the version that"
    with pytest.raises(CheckpointMismatch, match=expected):
        parse_manifest(_resigned(_fields() | change), "x")


@pytest.mark.parametrize("body", [b"[" * 100_000 + b"\n}", b"[]\n}", b"\xff\n}", b"1\n}", b"\n}"])
def test_signed_nonsense_is_damage(body: bytes) -> None:
    with pytest.raises(CheckpointCorrupted, match="is not a manifest"):
        parse_manifest(signed(body), "x")


def test_missing_huge_and_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointCorrupted, match=r"has no manifest\.json: incomplete save"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(DiskError, match="Is a directory"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).rmdir()
    (tmp_path / MANIFEST_NAME).write_bytes(_manifest().to_bytes())
    monkeypatch.setattr(manifest_module, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(CheckpointCorrupted, match="too large for a manifest"):
        read_manifest(tmp_path)
