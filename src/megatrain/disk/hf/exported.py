"""The record of an export: the step of its model, and the hashes of its files.

The file is written last and signed as a manifest is. A folder that has it is complete; its
bytes can be checked at any later time. It is read as untrusted input. Where a run's models are
listed, an export whose record has changed is ignored, as if it had none; where somebody asks for
that folder itself, it is refused.

Law (tests/disk/hf/test_exported.py): a model folder that has hashes beside it, in its own record or
in the manifest of its checkpoint, passes `require_as_written` only with the bytes it was written
with.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.disk.checkpoint.checked_read import read_checked
from megatrain.disk.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    read_manifest,
    record_of,
    signed,
    unsigned,
)
from megatrain.errors import CheckpointCorrupted, DiskError
from megatrain.memory.direct import CHUNK_BYTES

RECORD_NAME = "megatrain.json"
MAX_RECORD_BYTES = 64 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """Which model of a run an export is."""

    step: int
    best_loss: float | None
    """The loss of an evaluation at this step, if the model is the best one of its run."""
    files: Mapping[str, FileRecord]

    def check(self, folder: Path, *, shown: bool = True) -> None:
        """Read every file. Raises CheckpointCorrupted or DiskError unless all are as written."""
        read_checked(folder, self.files, "checking", shown=shown)

    def to_bytes(self) -> bytes:
        fields = {
            "step": self.step,
            "best_loss": self.best_loss,
            "chunk_bytes": CHUNK_BYTES,
            "files": {name: record.to_json() for name, record in sorted(self.files.items())},
        }
        return signed(json.dumps(fields, indent=1).encode())


def read_exported(folder: Path) -> ExportRecord | None:
    """Return the record of an export; None if there is none or it was changed."""
    try:
        return _read_record(folder / RECORD_NAME)
    except (OSError, CheckpointCorrupted):
        return None


def require_as_written(folder: Path, *, shown: bool = True) -> None:
    """Read every file of a model folder that has hashes beside it; others are taken as they are.

    The hashes are those of its record, or of the manifest if it is the model of a checkpoint.
    `shown`: a bar shows the progress. Raises CheckpointCorrupted or DiskError.
    """
    folder = folder.resolve()
    if os.path.lexists(path := folder / RECORD_NAME):
        way_out = (
            "Use another copy, or export the model again. If the change is yours, delete "
            f"{path}: the folder is then used unchecked."
        )
        try:
            _read_record(path).check(folder, shown=shown)
        except OSError as error:
            raise DiskError(f"cannot read {path}: {error.strerror}") from error
        except CheckpointCorrupted as error:
            raise CheckpointCorrupted(f"{error}. {way_out}") from error
    elif folder.name == "model" and (folder.parent / MANIFEST_NAME).is_file():
        files = read_manifest(folder.parent).files.items()
        model = {name: record for name, record in files if name.startswith("model/")}
        read_checked(folder.parent, model, "checking", shown=shown)


def _read_record(path: Path) -> ExportRecord:
    """Return a record. Raises CheckpointCorrupted if it is not as we write them, or OSError."""
    if path.stat().st_size > MAX_RECORD_BYTES:
        raise CheckpointCorrupted(f"{path} is too large for the record of an export")
    try:
        return _from_json(json.loads(unsigned(path.read_bytes(), str(path))))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointCorrupted(f"{path} is not the record of an export") from error


def _from_json(fields: Any) -> ExportRecord:
    step, loss = fields["step"], fields["best_loss"]
    if type(step) is not int or step < 0 or fields["chunk_bytes"] != CHUNK_BYTES:
        raise ValueError("not a step")
    if loss is not None and (type(loss) is not float or not math.isfinite(loss)):
        raise ValueError("not a loss")
    files = {}
    for name, value in dict(fields["files"]).items():
        if not _FILE_NAME.fullmatch(name):
            raise ValueError("not a file of an export")
        files[name] = record_of(value)
    return ExportRecord(step=step, best_loss=loss, files=files)
