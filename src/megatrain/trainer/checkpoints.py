"""A run's checkpoints: saved in the background, kept by rule, found again.

One save at a time. Whoever asks for another waits for the one under way; training waits only where
it reaches a block that is not yet copied (pipeline/snapshot.py). A save that fails is told and
recorded, and the run goes on with the checkpoint before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.disk.hf import HostModel
from megatrain.disk.parts import checkpoint_parts
from megatrain.disk.retention import best_of, clear_unfinished, prune
from megatrain.disk.save import require_space, save_checkpoint
from megatrain.errors import DiskError, SnapshotLost
from megatrain.files import point
from megatrain.pipeline.engine import Engine

FOLDER = "checkpoints"
Record = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """How a save ended."""

    step: int
    path: Path | None
    """None: it failed."""
    seconds: float
    error: str | None
    deleted: tuple[str, ...]

    def __str__(self) -> str:
        if self.path is None:
            return f"step {self.step}: NOT saved: {self.error}. Training continues."
        said = f"step {self.step}: saved in {self.path.name}, {self.seconds:.1f} s"
        return said if self.error is None else f"{said}; older ones stay: {self.error}"

    def event(self) -> dict[str, Any]:
        """Return the record for events.jsonl."""
        facts: dict[str, Any] = {"event": "saved" if self.path else "save failed"}
        facts |= {"step": self.step, "seconds": round(self.seconds, 3)}
        if self.path is not None:
            facts |= {"checkpoint": self.path.name, "deleted": list(self.deleted)}
        return facts if self.error is None else facts | {"error": self.error}


class Checkpoints:
    """Saves an engine's state into a run folder."""

    def __init__(
        self, run: Path, home: HostModel, engine: Engine, *, keep: int, keep_best: bool
    ) -> None:
        """Raises DiskError if the disk has no room for a checkpoint."""
        self.folder = run / FOLDER
        self._run, self._engine = run, engine
        self._keep, self._keep_best = keep, keep_best
        self._parts = checkpoint_parts(home)
        self.num_bytes = self._parts.num_bytes
        require_space(self.folder, self._parts)
        self._thread: threading.Thread | None = None
        self._results: list[Saved] = []
        self._failure: BaseException | None = None
        self.last_step: int | None = None
        """The last step that a save was begun for."""
        self.saved_step: int | None = None
        """The last step whose save is acknowledged."""

    def begin(self, step: int, training: Mapping[str, Any]) -> None:
        """Save the state after the engine's last step, in the background."""
        self.wait()
        snapshot = self._engine.snapshot()
        self.last_step = step
        training = {**training, "num_updates": sorted(snapshot.num_updates.items())}
        began = time.monotonic()

        def work() -> None:
            path, error, deleted = None, None, []
            try:
                path = save_checkpoint(self.folder, self._parts, snapshot, training)
                self.saved_step = step
                deleted = self._tidy(path)
            except (DiskError, SnapshotLost, OSError) as failure:
                error = str(failure).removesuffix(".")  # OSError: someone removed the folder
            except BaseException as failure:  # a bug of ours: raised where it is noticed
                self._failure, error = failure, repr(failure)
            seconds = time.monotonic() - began
            self._results.append(
                Saved(step=step, path=path, seconds=seconds, error=error, deleted=tuple(deleted))
            )

        self._thread = threading.Thread(target=work, name="save")
        self._thread.start()

    def give_up(self, step: int, error: Exception) -> None:
        """Note that a save was not even begun."""
        reason = str(error).removesuffix(".")
        self._results.append(Saved(step=step, path=None, seconds=0.0, error=reason, deleted=()))

    def ended(self) -> list[Saved]:
        """Return the saves that ended since the last call. Raises only what is a bug."""
        self._raise_failure()
        results, self._results = self._results, []
        return results

    def wait(self) -> None:
        """Wait for the save under way. Raises only what is a bug."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _tidy(self, newest: Path) -> list[str]:
        """Delete what is not kept, and what an earlier failure has left; set the links."""
        clear_unfinished(self.folder)
        deleted = prune(self.folder, self._keep, keep_best=self._keep_best, newest=newest)
        point(self._run / "last", f"{FOLDER}/{newest.name}")
        best = best_of(self.folder)
        if best is not None:
            point(self._run / "best", f"{FOLDER}/{best.path.name}")
        return deleted
