"""A run's folder: everything that explains the run, written as it happens.

    config.yaml     what was asked, resolved       machine.json    where it ran
    plan.json       memory, planned and measured   data_card.json  what it was trained on
    metrics.jsonl   one line per step and per evaluation
    samples.jsonl   text before and during training
    events.jsonl    saves, resumes, signals, rollbacks
    checkpoints/    step-N-id, each whole or not there; links `last` and `best` for people
    trace.json      one step, for Perfetto         report.html, loss.png

Lines are appended whole, so a run that dies leaves all of them but perhaps the last. A checkpoint
knows how long the files were; a resumed run goes on from there, and each line comes once. Only one
process writes to a folder: it holds a lock as long as it lives.

A disk that is full or fails must not end a run of weeks: lines it does not take are kept in memory
and written with a later one, in order, and no checkpoint is begun before they are all written.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatrain import files
from megatrain.errors import DiskError, RunFolderError

RESUMED_FILES = ("metrics.jsonl", "samples.jsonl")
"""Those whose lines belong to steps; events belong to the clock."""
_REQUEST = ".save"


class RunFolder:
    """The folder of one run, locked. Use it in a `with` block, or `close` it."""

    def __init__(self, path: str | Path) -> None:
        """Make the folder if it is not there. Raises RunFolderError if it is in use."""
        self.path = Path(path)
        self.trouble: str | None = None
        """Why lines wait in memory; None while none do."""
        self._waiting: dict[str, bytes] = {}
        self._starts: dict[str, int] = {}
        try:
            files.make_folder(self.path)
            self._lock: int | None = files.lock(self.path / ".lock")
        except (OSError, DiskError) as error:
            raise RunFolderError(f"{self.path}: cannot be made a run folder: {error}") from error

    @property
    def has_run(self) -> bool:
        """Whether a run has left something here."""
        return (self.path / "metrics.jsonl").exists()

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a line to `metrics.jsonl`, `samples.jsonl` or `events.jsonl`, sooner or later."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=True) + "\n"
        data = line.encode("utf-8", "backslashreplace")
        self._waiting[name] = self._waiting.get(name, b"") + data
        try:
            self._write_waiting()
            self.trouble = None
        except (DiskError, OSError) as error:  # OSError: the folder was removed
            self.trouble = str(error)

    def _write_waiting(self) -> None:
        for name, data in list(self._waiting.items()):
            path = self.path / name
            if name not in self._starts:
                self._starts[name] = path.stat().st_size if path.exists() else 0
            files.append(path, data, self._starts[name])
            del self._waiting[name], self._starts[name]

    def lengths(self) -> dict[str, int]:
        """Return how long the step's files are now; so much of them is then on stable storage.

        Raises DiskError or OSError, also if lines wait that the disk still does not take.
        """
        self._write_waiting()
        return {name: files.sync_file(self.path / name) for name in RESUMED_FILES}

    def cut(self, lengths: Mapping[str, int]) -> None:
        """Forget the lines of steps after a checkpoint: they will come again."""
        for name in RESUMED_FILES:
            files.cut(self.path / name, int(lengths.get(name, 0)))
            self._waiting.pop(name, None)
            self._starts.pop(name, None)

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a file, whole or not at all."""
        data = text.encode("utf-8", "backslashreplace")
        files.write_file(self.path / name, data, durable=False)

    def save_was_asked(self) -> bool:
        """Return whether someone asked for a save since the last call."""
        request = self.path / _REQUEST
        if not request.exists():
            return False
        with suppress(DiskError):  # then it is asked again after the next step
            files.remove(request)
        return True

    def close(self) -> None:
        if self._lock is not None:
            files.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


def ask_for_save(run: Path) -> None:
    """Ask whoever trains in a run folder to save. Raises RunFolderError if nobody does."""
    if not (run / "metrics.jsonl").exists():
        raise RunFolderError(f"{run}: has no metrics.jsonl: give the folder of a run")
    try:
        files.close(files.lock(run / ".lock"))
    except RunFolderError:
        files.append(run / _REQUEST, b"")
        return
    raise RunFolderError(f"{run}: nobody is training there now")


def machine_facts() -> dict[str, Any]:
    """Return where this runs, for a report or a bug report. Imports torch."""
    import psutil
    import torch
    import transformers

    from megatrain.version import __version__

    return {
        "megatrain": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "ram_bytes": psutil.virtual_memory().total,
    }
