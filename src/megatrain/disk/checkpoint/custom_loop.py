"""Checkpoints of a loop that is not a run: saved between steps, taken up by the same script.

    notes = load_checkpoint(folder, home, engine) or {"step": 0}
    for step in range(notes["step"], 1000):
        engine.step(...)
        save_checkpoint(folder, home, engine, {"step": step + 1})

The files are those of a run's checkpoints: complete or absent, with a hash of every byte. What
else decides the loop's next step, such as its position in the data, goes into `notes`.

Laws (tests/disk/checkpoint/test_custom_loop.py)
    1. A loop that is killed at any time and resumed ends with the bits of one that was not.
    2. A damaged checkpoint is skipped for an older one; if none is complete, that is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.disk.checkpoint.restore import restore
from megatrain.disk.checkpoint.retention import clear_unfinished, finished, prune
from megatrain.disk.checkpoint.save import write_checkpoint
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.errors import CheckpointCorrupted

_NOTES, _UPDATES = "notes", "num_updates"


def save_checkpoint(
    folder: str | Path, home: HostModel, engine: Engine, notes: Mapping[str, Any], *, keep: int = 2
) -> Path:
    """Save all that the engine's next step depends on; return the checkpoint's folder.

    `notes` are what JSON can say. Finishes late updates, returns when all is on disk, and deletes
    all but the newest `keep` checkpoints. Raises DiskError.
    """
    engine.synchronize()
    snapshot = engine.snapshot()
    training = {_NOTES: dict(notes), _UPDATES: sorted(snapshot.num_updates.items())}
    path = write_checkpoint(Path(folder), checkpoint_parts(home), snapshot, training)
    clear_unfinished(Path(folder))
    prune(Path(folder), keep, keep_best=False, newest=path)
    return path


def load_checkpoint(folder: str | Path, home: HostModel, engine: Engine) -> dict[str, Any] | None:
    """Take up the newest complete checkpoint; return its notes, or None if no save was finished.

    Raises CheckpointCorrupted if none is complete, CheckpointMismatch for another model or
    optimizer.
    """
    damage: CheckpointCorrupted | None = None
    for path in finished(Path(folder)):
        try:
            manifest = read_manifest(path)
            restore(path, manifest, checkpoint_parts(home))
            updates = {int(block): int(count) for block, count in manifest.training[_UPDATES]}
            notes = manifest.training[_NOTES]
        except CheckpointCorrupted as error:
            damage = damage or error
            continue
        except (KeyError, TypeError, ValueError):
            damage = damage or CheckpointCorrupted(f"{path} was not saved by a loop")
            continue
        engine.restore(manifest.step, updates)
        return dict(notes)
    if damage is not None:
        raise damage
    return None
