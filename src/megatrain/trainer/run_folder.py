"""A run's folder: everything that explains the run, written as it happens.

    config.yaml     what was asked, resolved       machine.json    where it ran
    plan.json       memory, planned and measured   data_card.json  what it was trained on
    metrics.jsonl   one line per step and per evaluation
    samples.jsonl   text before and during training
    trace.json      one step, for Perfetto         report.html, loss.png

Lines are appended whole and flushed, so a run that dies leaves all of them but perhaps the last.
Only one process writes to a folder: it holds a lock as long as it lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from megatrain.errors import RunFolderError


class RunFolder:
    """The folder of one run, locked. Use it in a `with` block, or `close` it."""

    def __init__(self, path: str | Path) -> None:
        """Make the folder if it is not there. Raises RunFolderError if it is in use."""
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock: TextIO = (self.path / ".lock").open("w")
        except OSError as error:
            raise RunFolderError(f"{self.path}: cannot be made a run folder: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise RunFolderError(
                f"{self.path}: another process is writing to this run. Wait for it, or give "
                "save.dir another folder."
            ) from error

    @property
    def has_run(self) -> bool:
        """Whether a run has left something here."""
        return (self.path / "metrics.jsonl").exists()

    def append(self, name: str, record: dict[str, Any]) -> None:
        """Add a line to `metrics.jsonl` or `samples.jsonl`."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=True) + "\n"
        with (self.path / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line)

    def write_json(self, name: str, value: Any) -> None:
        self.write_text(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a file, whole or not at all."""
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(temporary, self.path / name)

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


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
