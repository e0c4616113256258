"""A run's checkpoints: saved in the background, kept by rule, found again.

All ranks save together; rank 0 alone deletes checkpoints and sets the links.

There is one save at a time. A request for another waits for the active one; training waits only
where it reaches a block that is not yet copied (engine/snapshot.py). A save that fails is reported
and recorded, and the run continues with the checkpoint before it.

Among ranks, a save is given up when a file call of one rank does not return for STALL_SHARE of the
ranks' deadline: updates of that rank may wait for a block that the save holds, and all other ranks
for it. No save begins while such a call is out.

When the disk is full, checkpoints that the keep rule would delete after the next save are deleted
before it, the oldest first and only as many as needed. The newest complete one is never among them.

The result of a run that keeps its best model is loaded from a checkpoint when the run has ended.

Laws (tests/run/test_full_disk.py)
    1. At every instant after the first save at least one complete checkpoint exists.
    2. A checkpoint that a resume found damaged does not count for `keep`.
    3. One that it could not read, or that training failed from, does not count either, and is not
       deleted for that (tests/run/test_unreadable.py, tests/run/test_rollback.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore, verify
from megatrain.disk.checkpoint.retention import (
    best_of,
    clear_unfinished,
    disposable,
    finished,
    prune,
)
from megatrain.disk.checkpoint.retried import retried
from megatrain.disk.checkpoint.save import (
    delete_checkpoint,
    existing,
    require_space,
    spare_bytes,
    write_checkpoint,
)
from megatrain.disk.hf.export import Origin
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.errors import (
    CheckpointCorrupted,
    DiskError,
    DiskFull,
    SnapshotLost,
    StorageTimeout,
)
from megatrain.files import free_disk_bytes, point, sync_folder
from megatrain.memory.file_calls import FileCalls
from megatrain.memory.ledger import gib
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.folder import FOLDER
from megatrain.run.state import RunState

STALL_SHARE = 0.25
"""Several calls in a row may each take that long before the ranks' deadline is reached."""
Record = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """The end of a save."""

    step: int
    path: Path | None
    """The checkpoint; None: the save failed."""
    seconds: float
    error: str | None
    deleted: tuple[str, ...]
    """Older checkpoints, deleted by the keep rule after a save, or before it for room."""
    full: bool = False
    """Whether it failed because the disk is full."""
    stalled: bool = False
    """Whether it failed because a file call did not return."""

    def __str__(self) -> str:
        if self.path is None:
            return f"step {self.step}: NOT saved: {self.error}"
        text = f"step {self.step}: saved in {self.path.name}, {self.seconds:.1f} s"
        return text if self.error is None else f"{text}; older ones stay: {self.error}"

    def event(self) -> dict[str, Any]:
        """Return the record for events.jsonl."""
        facts: dict[str, Any] = {"event": "saved" if self.path else "save failed"}
        facts |= {"step": self.step, "seconds": round(self.seconds, 3)}
        if self.path is not None:
            facts |= {"checkpoint": self.path.name}
        if self.path is not None or self.deleted:
            facts |= {"deleted": list(self.deleted)}
        return facts if self.error is None else facts | {"error": self.error}


class Checkpoints:
    """Saves an engine's state into a run folder."""

    def __init__(
        self,
        run: Path,
        home: HostModel,
        engine: Engine,
        *,
        keep: int,
        keep_best: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        """Raises DiskFull if the disk has no room for a checkpoint."""
        self._ranks = ranks
        self.folder = run / FOLDER
        self._run = run
        self.engine = engine
        """Whose state is saved. Another one may take its place when no save is active."""
        self._keep = keep
        self._keep_best = keep_best
        self._parts = checkpoint_parts(home)
        self._known_whole: set[Path] = set()
        """Checkpoints that this process has saved or read."""
        self._damaged: set[Path] = set()
        self._aside: set[Path] = set()
        """Checkpoints that could not be read, or that training failed from: they may be whole."""
        self._freed: list[str] = []
        """Checkpoints that were deleted for room since the last save."""
        self._thread: threading.Thread | None = None
        self._results: list[SaveResult] = []
        self._failure: BaseException | None = None
        self.last_step: int | None = None
        """The last step that a save was begun for."""
        self.saved_step: int | None = None
        """The last step whose save is acknowledged."""
        self.was_full = False
        """Whether the last save failed because the disk is full."""
        self.was_stalled = False
        """Whether the last save failed because a file call of a rank did not return."""
        self._calls: FileCalls | None = None
        """The file calls of the last save."""
        ranks.on_first(self._require_a_start)

    def _require_a_start(self) -> None:
        """Raise DiskFull if no save could succeed. Deletes nothing: the run may be a dry one."""
        try:
            require_space(self.folder, self._parts)
        except DiskFull:
            if not self._spare():
                raise

    def took_up(
        self, step: int, path: Path, damaged: Sequence[Path], aside: Sequence[Path] = ()
    ) -> None:
        """Take note of a resume: from which checkpoint, and which ones it found damaged.

        Those set `aside` do not count for `keep`, and are not deleted for that.
        """
        self.last_step = self.saved_step = step
        self._known_whole.add(path)
        self._damaged.update(damaged)
        self._aside.update(aside)
        self._aside.discard(path)

    @property
    def damaged(self) -> frozenset[Path]:
        """The checkpoints that were found damaged."""
        return frozenset(self._damaged)

    def make_room(self) -> None:
        """Delete old checkpoints, as far as the keep rule allows, until another one fits.

        Waits for the active save. Raises DiskFull if there is still no space.
        """
        self.wait()
        while True:
            try:
                require_space(self.folder, self._parts)
                return
            except DiskFull:
                if not self.free_one():
                    raise

    def free_one(self) -> bool:
        """Delete the oldest checkpoint that the next save would make superfluous, if any."""
        spare = self._spare()
        if spare:
            delete_checkpoint(spare[0])
            sync_folder(self.folder)
            self._freed.append(spare[0].name)
        return bool(spare)

    def _spare(self) -> list[Path]:
        newest = next(filter(self._is_whole, finished(self.folder)), None)
        if newest is None:
            return []
        keep = max(1, self._keep - 1)  # the next save will be one of them
        return disposable(
            self.folder,
            keep,
            keep_best=self._keep_best,
            newest=newest,
            damaged=self._damaged,
            aside=self._aside,
        )

    def _is_whole(self, path: Path) -> bool:
        """Return whether every byte is right; reads those that this process did not write."""
        if path not in self._known_whole | self._damaged | self._aside:
            try:
                verify(path)
                self._known_whole.add(path)
            except CheckpointCorrupted:
                self._damaged.add(path)
            except DiskError:
                self._aside.add(path)
        return path in self._known_whole

    def shortage(self) -> str | None:
        """Return what a disk that is too small for `save.keep` means, in words; None if it is not.

        While a checkpoint is written, those to keep and the best are there beside it.
        """
        size, wanted = self._parts.num_bytes, self._keep + 1 + self._keep_best
        free = free_disk_bytes(existing(self.folder)) - spare_bytes(self._parts)
        fit = free // size + len(finished(self.folder))
        if fit >= wanted:
            return None
        text = f"the disk has space for {fit} checkpoint{'s' if fit != 1 else ''} of {gib(size)}"
        if fit == 1:
            return f"{text}: only one save is possible. Set save.dir to a larger disk"
        return (
            f"{text}, and save.keep {self._keep} needs {wanted} while one is written: the oldest "
            "will be deleted before each save, not after it"
        )

    @property
    def out(self) -> str | None:
        """The file call, in words, of a save that was given up and has not returned here."""
        return None if self._calls is None else self._calls.out

    def begin(self, step: int, training: Mapping[str, Any], patience: int = 1) -> None:
        """Save the state after the engine's last step, in the background.

        File calls may take `patience` times as long as usual.
        """
        self.wait()
        assert self.out is None, "calls of the last save must have returned"
        limit_s = patience * STALL_SHARE * self._ranks.patience_s or None
        calls = self._calls = FileCalls(limit_s)
        snapshot = self.engine.snapshot()
        self.last_step = step
        training = {**training, "num_updates": sorted(snapshot.num_updates.items())}
        began = time.monotonic()

        def work() -> None:
            path, error, deleted, full, stalled = None, None, [], False, False
            try:
                path = write_checkpoint(
                    self.folder, self._parts, snapshot, training, ranks=self._ranks, calls=calls
                )
                saved = path
                self.saved_step = step
                self._known_whole.add(path)
                deleted = self._ranks.on_first(lambda: calls.do(lambda: self._tidy(saved))) or []
            except StorageTimeout as failure:
                error, stalled = str(failure), path is None
            except DiskFull as failure:
                error, full = str(failure), path is None
                if full:
                    self._ranks.on_first(self._free_after_failure)
            except (DiskError, SnapshotLost, OSError) as failure:
                error = str(failure).removesuffix(".")  # OSError: someone removed the folder
            except BaseException as failure:  # a bug in MegaTrain: raised to the caller
                self._failure, error = failure, repr(failure)
            calls.close()
            seconds = time.monotonic() - began
            self._end(step, path, error, deleted, full=full, stalled=stalled, seconds=seconds)

        self._thread = threading.Thread(target=work, name="save")
        self._thread.start()

    def give_up(self, step: int, error: Exception) -> None:
        """Note that a save was not even begun."""
        reason, full = str(error).removesuffix("."), isinstance(error, DiskFull)
        stalled = isinstance(error, StorageTimeout)
        self._end(step, None, reason, [], full=full, stalled=stalled, seconds=0.0)

    def _end(
        self,
        step: int,
        path: Path | None,
        error: str | None,
        deleted: list[str],
        *,
        full: bool,
        stalled: bool,
        seconds: float,
    ) -> None:
        self.was_full = full
        self.was_stalled = stalled
        freed, self._freed = self._freed, []
        self._results.append(
            SaveResult(
                step=step,
                path=path,
                seconds=seconds,
                error=error,
                deleted=(*freed, *deleted),
                full=full,
                stalled=stalled,
            )
        )

    def _free_after_failure(self) -> None:
        """Make space for the next try: the disk has less than it reported."""
        with suppress(DiskError, OSError):
            self.free_one()

    def ended(self) -> list[SaveResult]:
        """Return the saves that ended since the last call. Raises only bugs."""
        self._raise_failure()
        results, self._results = self._results, []
        return results

    def wait(self) -> None:
        """Wait for the active save. Raises only bugs."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _tidy(self, newest: Path) -> list[str]:
        """Delete checkpoints that are not kept and remains of failures; set the links."""
        clear_unfinished(self.folder)
        deleted = prune(
            self.folder,
            self._keep,
            keep_best=self._keep_best,
            newest=newest,
            damaged=self._damaged,
            aside=self._aside,
        )
        self._known_whole.intersection_update(finished(self.folder))  # those that are left
        point(self._run / "last", f"{FOLDER}/{newest.name}")
        best = best_of(self.folder, self._damaged)
        if best is not None:
            point(self._run / "best", f"{FOLDER}/{best.path.name}")
        return deleted


def load_best(
    checkpoints: Checkpoints, home: HostModel, state: RunState, ranks: Ranks = ALONE
) -> tuple[Origin, str]:
    """Put the best model that was saved into `home`; return which it is, also in words.

    The last one stays where memory holds its only copy, or where the best cannot be read: the
    text reports it. Rank 0 chooses, and reads the whole; each rank then reads its part.
    """
    checkpoints.wait()
    chosen = ranks.long_work(lambda: ranks.on_first(partial(_chosen, checkpoints, state)))
    found = _Chosen(**ranks.decide(lambda: None if chosen is None else asdict(chosen)))
    if found.path is not None:
        path = Path(found.path)
        ranks.long_work(lambda: restore(path, read_manifest(path), checkpoint_parts(home)))
    return Origin(step=found.step, best_loss=found.loss), found.text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The model that is the result of a run."""

    step: int
    loss: float | None = None
    text: str
    path: str | None = None
    """Its checkpoint; None: memory has it."""


def _chosen(checkpoints: Checkpoints, state: RunState) -> _Chosen:
    last = f"model of step {state.global_step}, the last"
    best = best_of(checkpoints.folder, checkpoints.damaged)
    if best is None:
        return _Chosen(step=state.global_step, text=f"{last}; no evaluated model was saved")
    text = state.evaluations.place(best.step, best.eval_loss)
    found = _Chosen(step=best.step, loss=best.eval_loss, text=text)
    if best.step == state.global_step:
        return found
    if checkpoints.saved_step != state.global_step:
        return _Chosen(step=state.global_step, text=f"{last}, because the best was not saved")
    try:
        retried(lambda: verify(best.path))  # a restore that failed half-way would leave a mixture
    except (CheckpointCorrupted, DiskError) as error:
        found_wrong = "is damaged" if isinstance(error, CheckpointCorrupted) else "cannot be read"
        return _Chosen(
            step=state.global_step, text=f"{last}, because the best {found_wrong}: {error}"
        )
    return replace(found, path=str(best.path))
