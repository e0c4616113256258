"""The record of an export: the step of its model, and the hashes of its files.

The file is written last and signed as a manifest is. A folder that has it is complete; its
bytes can be checked at any later time. It is read as untrusted input: a record with any change
is ignored, as if the folder had none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.disk.checkpoint.checked_read import read_checked
from megatrain.disk.checkpoint.manifest import FileRecord, record_of, signed, unsigned
from megatrain.errors import CheckpointDamaged
from megatrain.memory.direct import CHUNK_BYTES

RECORD_NAME = "megatrain.json"
MAX_RECORD_BYTES = 64 << 20
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord:
    """Which model of a run an export is."""

    step: int
    best_loss: float | None
    """Of an evaluation at this step, if the model is the best one of its run."""
    files: Mapping[str, FileRecord]

    def check(self, folder: Path) -> None:
        """Read every file. Raises CheckpointDamaged or DiskError unless all are as written."""
        read_checked(folder, self.files, "checking")

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
    path = folder / RECORD_NAME
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            return None
        fields = json.loads(unsigned(path.read_bytes(), str(path)))
        return _from_json(fields)
    except (OSError, CheckpointDamaged, KeyError, TypeError, ValueError, RecursionError):
        return None


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
