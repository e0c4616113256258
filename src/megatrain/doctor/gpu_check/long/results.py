"""The folder of a long check, and the one file to attach.

    gpu-check-long/          a JSON file for each part, written as it ends, and again whenever it
                             has found more; traces, logs, and index.html, which explains them
    gpu-check-long.tar.gz    all of that, written anew each time, beside the old one, and renamed

No result holds a path, or the name of a user or a host.

Laws (tests/doctor/gpu_check/long/test_results.py)
    1. Whenever the process is killed, the archive is there and whole, with all parts that ended.
    2. A result counts for the machine, the device and the versions that it was measured with.
    3. A file that is damaged is no result: its part runs again.
"""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatrain.doctor.gpu_check.findings import anonymous
from megatrain.files import make_folder, remove, remove_folder, write_file

PartState = Literal["done", "left out", "failed", "unfinished"]
FORMAT = 1
_MOST_LOG_LINES = 120


class CannotRun(Exception):
    """A part cannot run on this device, for a reason. Does not leave the long check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """One part, as far as it came."""

    name: str
    asks: str
    state: PartState
    why: str
    """Why it is not done, for people; empty if it is."""
    machine: str
    """Key of machine, device and versions."""
    when: str
    seconds: float
    found: Mapping[str, Any]
    """`lead`, a sentence; `figures`, by name; `tables`, each a list of rows by column."""

    @property
    def is_settled(self) -> bool:
        """Whether the part need not run again here."""
        return self.state in ("done", "left out")


class ResultFolder:
    """The results of one long check on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.archive = path.with_name(f"{path.name}.tar.gz")

    def open(self) -> None:
        """Make the folder, and remove what a killed process has left. Raises DiskError."""
        make_folder(self.path)
        for path in self.path.glob(".*"):
            remove_folder(path)

    def read(self, name: str, machine: str) -> PartResult | None:
        """Return the result of a part on this machine, if there is one."""
        try:
            fields = json.loads((self.path / f"{name}.json").read_text(encoding="utf-8"))
            if fields.pop("format") != FORMAT or fields["machine"] != machine:
                return None
            return PartResult(**fields)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def write(self, result: PartResult) -> None:
        """Write the result of a part in place of an older one."""
        text = json.dumps({"format": FORMAT} | asdict(result), indent=1)
        write_file(self.path / f"{result.name}.json", _private(text).encode())

    def attach(self, name: str, data: bytes) -> None:
        """Write a file that belongs to a result: a trace, a page."""
        write_file(self.path / name, data)

    def attach_log(self, name: str, text: str) -> None:
        """Write the last lines of what a part printed, in place of those of an earlier trial."""
        lines = text.splitlines()[-_MOST_LOG_LINES:]
        if lines:
            self.attach(name, ("\n".join(map(anonymous, lines)) + "\n").encode())
        else:
            remove(self.path / name)

    def pack(self) -> None:
        """Write the archive anew: all files of the folder, in the order of their names."""
        paths = sorted(p for p in self.path.iterdir() if p.is_file() and p.name[0] != ".")
        write_file(self.archive, packed(self.path.name, paths))


def packed(folder: str, paths: Iterable[Path]) -> bytes:
    """Return an archive of files, without their times and owners."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="w", mtime=0) as zipped,
        tarfile.TarFile(fileobj=zipped, mode="w") as archive,
    ):
        for path in paths:
            data = path.read_bytes()
            entry = tarfile.TarInfo(f"{folder}/{path.name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _private(text: str) -> str:
    return "\n".join(map(anonymous, text.split("\n")))
