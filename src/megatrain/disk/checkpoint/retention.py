"""Retention: which checkpoints exist, and which of them are kept.

A folder with a manifest is a checkpoint; one without is a save that never ended, and is cleared
away by the next run that owns the folder. Links named `last` and `best` are for people: no rule
here reads them.

Laws (tests/disk/checkpoint/test_retention.py)
    1. The newest checkpoint and, if asked, the best are never deleted.
    2. Folders that are not our saves, and links, are neither opened nor removed.
    3. A checkpoint that is known as damaged does not count as one of those to keep.
    4. One that is set aside, because it could not be read or training failed from it, does not
       count either, and stays until as many others of its step or later exist as are to be kept.
    5. A folder whose manifest cannot be looked at is neither unfinished nor removed as such.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatrain.disk.checkpoint.manifest import MANIFEST_NAME, read_manifest
from megatrain.disk.checkpoint.save import delete_checkpoint
from megatrain.errors import CheckpointCorrupted, CheckpointMismatch, DiskError
from megatrain.files import sync_folder

_NAME = re.compile(r"step-(\d{8,})-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A folder that a save has finished."""

    path: Path
    step: int
    eval_loss: float | None
    """The loss of an evaluation at this very step."""


def finished(parent: Path) -> list[Path]:
    """Return the folders that have a manifest, the newest first. Their bytes are not checked."""
    folders = [path for path in _saves(parent) if _has_manifest(path)]
    return sorted(folders, key=_age, reverse=True)


def clear_unfinished(parent: Path) -> list[str]:
    """Remove saves that never ended; return their names. Only for who owns the run."""
    cleared = []
    for path in _saves(parent):
        if not _has_manifest(path):
            delete_checkpoint(path)
            cleared.append(path.name)
    return cleared


def prune(
    parent: Path,
    keep: int,
    *,
    keep_best: bool,
    newest: Path | None = None,
    damaged: Collection[Path] = (),
    aside: Collection[Path] = (),
) -> list[str]:
    """Delete what `disposable` returns; return the names."""
    folders = disposable(
        parent, keep, keep_best=keep_best, newest=newest, damaged=damaged, aside=aside
    )
    for folder in folders:
        delete_checkpoint(folder)
        sync_folder(parent)
    return [folder.name for folder in folders]


def disposable(
    parent: Path,
    keep: int,
    *,
    keep_best: bool,
    newest: Path | None = None,
    damaged: Collection[Path] = (),
    aside: Collection[Path] = (),
) -> list[Path]:
    """Return all but the newest `keep` checkpoints and, if asked, the best; the oldest first.

    `newest` was just saved and stays, even if a damaged one of a later step was skipped.
    Those known as `damaged` do not count for `keep`, are never the best, and come first.
    Those set `aside` do not count for `keep`, and stay until `keep` others are as new. While the
    best is wanted, one whose loss cannot be read now stays too: it may be the best.
    """
    folders = finished(parent)
    whole = [folder for folder in folders if folder not in damaged and folder not in aside]
    kept = {*whole[:keep], newest}
    steps = [step_of(folder) for folder in whole]
    kept.update(f for f in aside if sum(step >= step_of(f) for step in steps) < keep)
    if keep_best:
        kept.update(folder for folder in folders if not _is_readable(folder))
        if (best := best_of(parent, damaged)) is not None:
            kept.add(best.path)
    rest = [folder for folder in reversed(folders) if folder not in kept]
    return sorted(rest, key=lambda folder: folder not in damaged)


def best_of(parent: Path, damaged: Collection[Path] = ()) -> FoundCheckpoint | None:
    """Return the checkpoint with the lowest loss of an evaluation, the newer of equals."""
    best: FoundCheckpoint | None = None
    for folder in finished(parent):
        loss = None if folder in damaged else loss_of(folder)
        if loss is not None and (best is None or best.eval_loss is None or loss < best.eval_loss):
            best = FoundCheckpoint(path=folder, step=step_of(folder), eval_loss=loss)
    return best


def loss_of(folder: Path) -> float | None:
    """Return what an evaluation at a checkpoint's step gave; None without one, or if damaged."""
    try:
        loss = read_manifest(folder).training.get("eval_loss")
    except (CheckpointCorrupted, CheckpointMismatch, DiskError):
        return None  # damaged: a resume reports it
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def _is_readable(folder: Path) -> bool:
    """Return whether the system reads the manifest of a checkpoint, whatever is in it."""
    try:
        read_manifest(folder)
    except DiskError:
        return False
    except (CheckpointCorrupted, CheckpointMismatch):
        pass
    return True


def _saves(parent: Path) -> list[Path]:
    """Return the folders that saves have made. Raises DiskError if the system does not tell."""
    try:
        found = list(parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:  # not "no checkpoint": a resume would begin again
        raise DiskError(f"cannot read {parent}: {error.strerror}") from error
    return [path for path in found if _NAME.fullmatch(path.name) and not path.is_symlink()]


def _has_manifest(folder: Path) -> bool:
    """Return whether a save has finished. If the system does not tell, it counts as finished.

    Not `exists`: newer Pythons return False for any error, and the folder would be cleared away.
    """
    try:
        (folder / MANIFEST_NAME).stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # its reader reports what the system says
    return True


def step_of(folder: Path) -> int:
    """Return the step that a checkpoint's folder is named for."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def _age(folder: Path) -> tuple[int, int]:
    try:
        return step_of(folder), (folder / MANIFEST_NAME).stat().st_mtime_ns
    except OSError:
        return step_of(folder), 0
