"""The checkpoints of a run on their way to its bucket, behind the training.

`save.dir: s3://bucket/run` is a run whose truth is the bucket. It works in a folder of this machine
as any other run does: a checkpoint is durable here first, and is then sent by a thread, with its
files held open, so that deleting it here takes nothing away. There is one upload at a time; while
it lasts only the newest checkpoint waits. One that fails is tried again until it succeeds or a
newer one takes its place; the run goes on, and says so once.

`open_uploads` takes the lease of the run, and brings this machine's folder up to date with the
bucket: on an empty machine the newest whole checkpoint, and the best if the run keeps it. Saves of
this folder that never reached the bucket count as long as nobody else has written the run since.

Laws (tests/run/test_uploads.py)
    1. A run that continues on an empty machine ends in the bits of one that was not interrupted.
    2. A bucket that fails does not end a run; the end of the run waits for it, or says what it has
       not got.
    3. A run that was taken over ends with RunTaken, and adds nothing.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatrain import files
from megatrain.cache import writable_cache_folder
from megatrain.disk.checkpoint.retention import finished, step_of
from megatrain.disk.checkpoint.save import delete_checkpoint
from megatrain.disk.remote.download import bring
from megatrain.disk.remote.history import Lease, RemoteCheckpoint, take
from megatrain.disk.remote.upload import HeldCheckpoint, Sent, Uploader
from megatrain.errors import (
    CheckpointCorrupted,
    CheckpointMismatch,
    ConfigError,
    DiskError,
    MegaTrainError,
    RunTaken,
    StorageError,
    listing,
)
from megatrain.fetched import url_of
from megatrain.model_files import ADAPTER_CONFIG_NAME
from megatrain.models.config_json import CONFIG_NAME
from megatrain.places import open_place
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.folder import FOLDER
from megatrain.text import size

Exported = TypeVar("Exported")
_ENTRIES = (CONFIG_NAME, ADAPTER_CONFIG_NAME)
RECORD = ".bucket.json"
"""Which lease this machine's folder was last written under."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""Between two tries of an upload."""
IDLE_S = 600.0
"""At the end a run waits for an upload as long as something is sent within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadResult:
    """The end of an upload, or the first failure of one that is tried again."""

    step: int
    name: str
    seconds: float
    sent: Sent | None
    error: str | None = None
    is_final: bool = True
    """Whether it is over."""

    def __str__(self) -> str:
        if self.sent is None:
            if self.is_final:
                return f"step {self.step}: NOT uploaded: {self.error}"
            return (
                f"step {self.step}: NOT uploaded yet: {self.error}. Training continues, and it is "
                "tried again"
            )
        known = f", {size(self.sent.known_bytes)} were there" if self.sent.known_bytes else ""
        return (
            f"step {self.step}: uploaded, {size(self.sent.num_bytes)} sent{known}, "
            f"{self.seconds:.1f} s"
        )

    def event(self) -> dict[str, Any]:
        """Return the record for events.jsonl."""
        facts: dict[str, Any] = {"event": "uploaded" if self.sent else "upload failed"}
        facts |= {"step": self.step, "checkpoint": self.name, "seconds": round(self.seconds, 3)}
        if self.sent is not None:
            facts |= {"sent_bytes": self.sent.num_bytes, "known_bytes": self.sent.known_bytes}
        return facts if self.error is None else facts | {"error": self.error}


class Uploads:
    """Sends the checkpoints of one run; `add` and the others are called by the training thread."""

    def __init__(self, uploader: Uploader, run: Path) -> None:
        self._uploader = uploader
        self._run = run
        self._condition = threading.Condition()
        self._waiting: HeldCheckpoint | None = None
        self._active: HeldCheckpoint | None = None
        self._results: list[UploadResult] = []
        self._taken: str | None = None
        self._failure: BaseException | None = None
        self._moved_s = time.monotonic()
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return self._uploader.lease.place.url

    def add(self, checkpoint: Path) -> None:
        """Send a checkpoint of this machine, unless the bucket has it."""
        if self._uploader.has(checkpoint.name):
            return
        try:
            held = HeldCheckpoint(checkpoint, self._run)
        except (DiskError, CheckpointCorrupted, CheckpointMismatch) as error:
            self._ended(step_of(checkpoint), checkpoint.name, 0.0, error=str(error))
            return
        with self._condition:
            if self._waiting is not None:
                self._waiting.close()
            self._waiting = held
            self._moved_s = time.monotonic()
            self._condition.notify_all()

    def ended(self) -> list[UploadResult]:
        """Return what happened since the last call. Raises RunTaken if the run is another's."""
        with self._condition:
            results, self._results = self._results, []
        if self._failure is not None:
            raise self._failure
        if self._taken is not None:
            raise RunTaken(self._taken)
        return results

    @property
    def pending(self) -> list[str]:
        """The names of checkpoints that are not in the bucket yet."""
        with self._condition:
            return [one.folder.name for one in (self._active, self._waiting) if one is not None]

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait until all is sent; return whether it is.

        Gives up after `limit_s`, and anyway when nothing was sent for IDLE_S.
        """
        until = None if limit_s is None else time.monotonic() + limit_s
        with self._condition:
            while self._active is not None or self._waiting is not None:
                now = time.monotonic()
                left_s = self._moved_s + IDLE_S - now
                if until is not None:
                    left_s = min(left_s, until - now)
                if left_s <= 0 or not self._thread.is_alive():
                    return False
                self._condition.wait(min(left_s, 1.0))
        return True

    def send_folder(self, folder: Path, name: str) -> str:
        """Send a folder beside the run's checkpoints; return its URL. Raises StorageError."""
        self._uploader.lease.require()
        send_folder(f"{self.url}/{name}", folder)
        return f"{self.url}/{name}"

    def close(self) -> None:
        """Stop sending, and let others have the run."""
        with self._condition:
            self._is_closing = True
            self._uploader.is_stopped = True
            self._condition.notify_all()
        self._thread.join()
        for held in (self._waiting, self._active):
            if held is not None:
                held.close()
        with suppress(StorageError, RunTaken, CheckpointCorrupted):  # others then wait for a while
            self._uploader.lease.release()

    def _work(self) -> None:
        try:
            while (held := self._next()) is not None:
                self._send(held)
        except RunTaken as error:
            self._taken = str(error)
        except BaseException as error:  # a bug in MegaTrain: raised to the caller
            self._failure = error
        with self._condition:
            self._condition.notify_all()

    def _next(self) -> HeldCheckpoint | None:
        """Wait for a checkpoint to send; None: it is time to end."""
        with self._condition:
            if self._active is not None:
                self._active.close()
            self._active = None
            self._condition.notify_all()
            while self._waiting is None and not self._is_closing:
                self._condition.wait(1.0)
                self._uploader.lease.require()
            self._active, self._waiting = self._waiting, None
            return None if self._is_closing else self._active

    def _send(self, held: HeldCheckpoint) -> None:
        """Send a checkpoint, with patience, unless a newer one comes."""
        step, name, began = held.manifest.step, held.folder.name, time.monotonic()
        pause_s, reported = FIRST_PAUSE_S, False
        while True:
            try:
                sent = self._uploader.upload(held, self._advance)
            except StorageError as error:
                if not reported and not self._is_closing:
                    seconds = time.monotonic() - began
                    self._ended(step, name, seconds, error=str(error), is_final=False)
                    reported = True
            except (CheckpointCorrupted, DiskError, OSError) as error:
                self._ended(step, name, time.monotonic() - began, error=str(error))
                return
            else:
                self._ended(step, name, time.monotonic() - began, sent=sent)
                return
            with self._condition:
                until = time.monotonic() + pause_s
                while not self._is_closing and time.monotonic() < until:
                    self._condition.wait(until - time.monotonic())
                if self._is_closing or self._waiting is not None:
                    return
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _advance(self, num_bytes: int) -> None:
        self._moved_s = time.monotonic()

    def _ended(
        self,
        step: int,
        name: str,
        seconds: float,
        *,
        sent: Sent | None = None,
        error: str | None = None,
        is_final: bool = True,
    ) -> None:
        result = UploadResult(
            step=step, name=name, seconds=seconds, sent=sent, error=error, is_final=is_final
        )
        with self._condition:
            self._results.append(result)


def open_uploads(url: str, run: Path, *, keep: int, keep_best: bool) -> Uploads:
    """Take the run at `url`, bring the folder `run` up to date with it, and return its uploads.

    Raises RunFolderError if another process has the run, StorageError, and CheckpointCorrupted if
    the bucket has checkpoints and none is whole.
    """
    lease = take(open_place(url), say=_print)
    try:
        _bring_up_to_date(lease, run, keep_best=keep_best)
        record = json.dumps({"url": url, "lease": lease.number}).encode()
        files.write_file(run / RECORD, record)
    except BaseException:
        with suppress(MegaTrainError):
            lease.release()
        raise
    uploads = Uploads(Uploader(lease=lease, keep=keep, keep_best=keep_best), run)
    for newest in finished(run / FOLDER)[:1]:
        uploads.add(newest)
    return uploads


def _bring_up_to_date(lease: Lease, run: Path, *, keep_best: bool) -> None:
    live, parent = lease.live, run / FOLDER
    if not _is_successor(lease, run):
        names = {one.name for one in live}
        stale = [path for path in finished(parent) if path.name not in names]
        for path in stale:
            delete_checkpoint(path)
        if stale:
            _print(
                f"{lease.place.url}: another process has continued this run since; deleted "
                f"{listing([path.name for path in stale])} of {run}, which it never had"
            )
    elif any(step_of(path) >= live[0].step for path in finished(parent)) if live else True:
        return
    brought = _bring_newest(lease, live, parent, run)
    if keep_best:
        judged = [one for one in live if one.eval_loss is not None]
        best = min(judged, key=lambda one: (one.eval_loss or 0.0, -one.step), default=None)
        if best is not None and best != brought:
            bring(lease.place, best, parent, None)


def _bring_newest(
    lease: Lease, live: tuple[RemoteCheckpoint, ...], parent: Path, run: Path
) -> RemoteCheckpoint | None:
    reasons = []
    for one in live:
        try:
            bring(lease.place, one, parent, run)
        except CheckpointCorrupted as error:
            reasons.append(str(error))
            _print(f"skipped: {error}")
        else:
            return one
    if reasons:
        raise CheckpointCorrupted(
            f"{lease.place.url}: none of {len(reasons)} checkpoints is whole:\n  "
            + "\n  ".join(reasons)
        )
    return None


def _is_successor(lease: Lease, run: Path) -> bool:
    """Return whether nobody else has written the run since this machine's folder did."""
    if lease.before is None:
        return True
    try:
        return bool(json.loads((run / RECORD).read_bytes())["lease"] == lease.before.lease)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def send_folder(url: str, folder: Path) -> None:
    """Write the files of a folder to a place. Raises StorageError.

    What describes the others comes behind them, and the file that readers open first is the last:
    without it there is no model.
    """
    place = open_place(url)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in sorted(paths, key=lambda path: (path.suffix == ".json", path.name in _ENTRIES)):
        place.send(path.relative_to(folder).as_posix(), path)


def export_to(
    target: str | Path, write: Callable[[Path], Exported], ranks: Ranks = ALONE
) -> Exported:
    """Let `write` make a folder at `target`; at a URL, by way of this machine's cache.

    All ranks call it, and rank 0 sends. Raises ConfigError if there is something at the URL.
    """
    if (url := url_of(target)) is None:
        return write(Path(target))
    mark = hashlib.sha256(url.encode()).hexdigest()[:16]
    place = Path(ranks.decide(lambda: str(writable_cache_folder() / "exports" / mark)))

    def prepare() -> None:
        if open_place(url).listed():
            raise ConfigError(
                f"{url} exists and is not empty. Give another name, or delete what is there, if an "
                "export that was stopped has left it."
            )
        files.remove_folder(place)
        files.make_folder(place.parent)

    ranks.on_first(prepare)
    try:
        made = write(place)
        ranks.long_work(lambda: ranks.on_first(lambda: send_folder(url, place)))
    except BaseException:
        with suppress(DiskError):  # the first failure is the one to report
            ranks.on_first(lambda: files.remove_folder(place))
        raise
    ranks.on_first(lambda: files.remove_folder(place))
    return made


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
