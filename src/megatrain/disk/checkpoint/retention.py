"""Retention: which checkpoints exist, and which of them are kept.

A folder with a manifest is a checkpoint; one without is a save that never ended, and is cleared
away by the next run that owns the folder. Links named `last` and `best` are for people: no rule
here reads them.

Laws (tests/disk/checkpoint/test_retention.py)
    1. The newest checkpoint and, if asked, the best are never deleted.
    2. Folders that are not our saves, and links, are neither opened nor removed.
    3. A checkpoint that is known as damaged does not count as one of those to keep.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatrain.disk.checkpoint.manifest import MANIFEST_NAME, read_manifest
from megatrain.disk.checkpoint.save import delete_checkpoint
from megatrain.errors import CheckpointDamaged, CheckpointMismatch, DiskError
from megatrain.files import sync_folder

_NAME = re.compile(r"step-(\d{8,})-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """A folder that a save has finished."""

    path: Path
    step: int
    eval_loss: float | None
    """What an evaluation at this very step gave."""


def finished(parent: Path) -> list[Path]:
    """Return the folders that have a manifest, the newest first. Their bytes are not checked."""
    folders = [path for path in _saves(parent) if (path / MANIFEST_NAME).exists()]
    return sorted(folders, key=_age, reverse=True)


def clear_unfinished(parent: Path) -> list[str]:
    """Remove saves that never ended; return their names. Only for who owns the run."""
    cleared = []
    for path in _saves(parent):
        if not (path / MANIFEST_NAME).exists():
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
) -> list[str]:
    """Delete what `disposable` returns; return the names."""
    folders = disposable(parent, keep, keep_best=keep_best, newest=newest, damaged=damaged)
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
) -> list[Path]:
    """Return all but the newest `keep` checkpoints and, if asked, the best; the oldest first.

    `newest` was just saved and stays, even if a damaged one of a later step was skipped.
    Those known as `damaged` do not count for `keep`, are never the best, and come first.
    """
    folders = finished(parent)
    whole = [folder for folder in folders if folder not in damaged]
    kept = {*whole[:keep], newest}
    if keep_best and (best := best_of(parent, damaged)) is not None:
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
    except (CheckpointDamaged, CheckpointMismatch, DiskError):
        return None  # damaged: a resume reports it
    return loss if isinstance(loss, float) and math.isfinite(loss) else None


def _saves(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return [p for p in parent.iterdir() if _NAME.fullmatch(p.name) and not p.is_symlink()]


def step_of(folder: Path) -> int:
    """Return the step that a checkpoint's folder is named for."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1])


def _age(folder: Path) -> tuple[int, int]:
    return step_of(folder), (folder / MANIFEST_NAME).stat().st_mtime_ns
