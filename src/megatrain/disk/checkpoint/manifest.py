"""The manifest: the file that makes a folder a checkpoint.

It names every file with its size and the hash of each chunk, and carries the state of the run that
is not tensors. It is written last, so a folder that has one had all its bytes on stable storage. It
ends with a hash of itself, because a disk may change it like any other file. It is read as
untrusted input.

Laws (tests/disk/checkpoint/test_manifest.py)
    1. Whatever the bytes, the result is a manifest, a CheckpointCorrupted or a CheckpointMismatch.
    2. A manifest that was changed in any byte is refused, also where its meaning stays the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.errors import CheckpointCorrupted, CheckpointMismatch, DiskError
from megatrain.memory.direct import CHUNK_BYTES, digests

MANIFEST_NAME = "manifest.json"
SCHEMA = 1
MAX_MANIFEST_BYTES = 256 << 20
"""The hashes of 1.4 TB in chunks of 8 MiB are 7 MB."""
_FILE_NAME = re.compile(r"(model|state)/[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_END = b"\n}"
_SIGNATURE_BYTES = len(b',\n "sha256": ""\n}\n') + 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """Size and hashes of a file."""

    num_bytes: int
    digests: tuple[str, ...]
    """The xxh3-128 of each chunk."""

    @classmethod
    def of_bytes(cls, data: bytes) -> FileRecord:
        """Return the record of a file that holds `data`."""
        return cls(num_bytes=len(data), digests=digests(data))

    @classmethod
    def of_digests(cls, num_bytes: int, by_chunk: Mapping[int, str]) -> FileRecord:
        """Return the record of a file whose writer hashed its chunks, by their number."""
        hashes = tuple(by_chunk[number] for number in range(len(by_chunk)))
        return cls(num_bytes=num_bytes, digests=hashes)

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON; `record_of` reads it."""
        return {"num_bytes": self.num_bytes, "digests": list(self.digests)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The parts of a checkpoint."""

    step: int
    files: Mapping[str, FileRecord]
    """Records by path inside the folder."""
    model: str
    """Names the params: shapes, dtypes, and which are trained."""
    training: Mapping[str, Any]
    """The trainer's own state, as JSON."""

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for record in self.files.values())

    def to_bytes(self) -> bytes:
        fields = {
            "schema": SCHEMA,
            "step": self.step,
            "model": self.model,
            "chunk_bytes": CHUNK_BYTES,
            "training": self.training,
            "files": {name: record.to_json() for name, record in sorted(self.files.items())},
        }
        return signed(json.dumps(fields, indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest. Raises CheckpointCorrupted, CheckpointMismatch, DiskError."""
    path = folder / MANIFEST_NAME
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise CheckpointCorrupted(f"{path} is too large for a manifest")
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointCorrupted(f"{folder} has no {MANIFEST_NAME}: incomplete save") from None
    except OSError as error:
        raise DiskError(f"cannot read {path}: {error.strerror}") from error
    return parse_manifest(data, str(path))


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Return the manifest that `data` is. Raises CheckpointCorrupted or CheckpointMismatch."""
    try:
        fields = _object(json.loads(unsigned(data, where).decode("utf-8")))
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupted(f"{where} is not a manifest: {str(error)[:200]}") from None
    schema = fields.get("schema")
    if schema != SCHEMA or fields.get("chunk_bytes") != CHUNK_BYTES:
        raise CheckpointMismatch(
            f"{where} has another format ({str(schema)[:20]}; this version of MegaTrain reads "
            f"{SCHEMA}). Use the version that wrote it: machine.json in the run folder names it."
        )
    try:
        return Manifest(
            step=_count(fields["step"]),
            model=_text(fields["model"]),
            training=_object(fields["training"]),
            files={
                _file_name(name): record_of(value)
                for name, value in _object(fields["files"]).items()
            },
        )
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointCorrupted(f"{where} is not a manifest: {str(error)[:200]}") from None


def signed(body: bytes) -> bytes:
    """Return a JSON object with one more field at its end: the hash of all bytes before it."""
    checksum = hashlib.sha256(body).hexdigest().encode()
    return body.removesuffix(_END) + b',\n "sha256": "' + checksum + b'"' + _END + b"\n"


def unsigned(data: bytes, where: str) -> bytes:
    """Return the signed bytes. Raises CheckpointCorrupted if any byte has changed since."""
    body = data[:-_SIGNATURE_BYTES] + _END
    if signed(body) != data:
        raise CheckpointCorrupted(f"{where} has changed since it was written")
    return body


def record_of(value: Any) -> FileRecord:
    """Return a file's record from JSON. Raises KeyError or ValueError."""
    fields = _object(value)
    hashes = fields["digests"]
    if not isinstance(hashes, list) or not all(
        isinstance(text, str) and _DIGEST.fullmatch(text) for text in hashes
    ):
        raise ValueError("invalid hash")
    record = FileRecord(num_bytes=_count(fields["num_bytes"]), digests=tuple(hashes))
    if len(record.digests) != -(-record.num_bytes // CHUNK_BYTES):
        raise ValueError("the number of hashes and chunks differs")
    return record


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"{name[:100]!r} is not a file of a checkpoint")
    return name


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:40]!r} is not text")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:40]!r} is not an object")
    return value
