"""Saving a checkpoint: afterwards it is complete, or it is not there.

    mkdir step-N-id, fsync parent -> files, each hashed on the way and fsynced -> fsync folders
    -> manifest under another name, fsync -> rename -> fsync folder: the checkpoint is acknowledged

Every file is new and the manifest comes last, so a crash at any instant leaves a folder without a
manifest, which readers ignore, or a complete checkpoint.

Laws (tests/disk/checkpoint/test_save.py)
    1. A failure at any call leaves no folder behind, and older checkpoints as they were.
    2. A block is held no longer than it takes to copy it into the writer's buffers.
    3. Memory grows by the buffers of the queue, not by the state.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatrain.disk.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest
from megatrain.disk.checkpoint.parts import Parts
from megatrain.engine.snapshot import Snapshot
from megatrain.errors import DiskError, DiskFull
from megatrain.files import (
    free_disk_bytes,
    make_folder,
    make_new_folder,
    remove,
    remove_folder,
    sync_folder,
    write_file,
)
from megatrain.memory.direct import DirectWriter, WriteQueue
from megatrain.memory.ledger import gib
from megatrain.progress import Advance

MOST_SPARE_BYTES = 64 << 20
"""For the manifest, the file system's own bookkeeping, and the log of the run."""


def save_checkpoint(
    parent: Path,
    parts: Parts,
    snapshot: Snapshot,
    training: Mapping[str, Any],
    advance: Advance = lambda num_bytes: None,
) -> Path:
    """Write a checkpoint into a new folder of `parent`, and return the folder: it is acknowledged.

    Raises DiskError or SnapshotLost; then nothing is left of it. Closes the snapshot.
    """
    folder = parent / f"step-{snapshot.num_steps:08}-{secrets.token_hex(4)}"
    try:
        require_space(parent, parts)
        make_folder(parent)
        make_new_folder(folder)
        for name in ("model", "state"):
            make_new_folder(folder / name)
        records = _write_files(folder, parts, snapshot, advance)
        for name in ("model", "state"):
            sync_folder(folder / name)
        sync_folder(folder)
        manifest = Manifest(
            step=snapshot.num_steps, files=records, model=parts.model, training=training
        )
        write_file(folder / MANIFEST_NAME, manifest.to_bytes())
    except BaseException:
        snapshot.close()
        with suppress(DiskError):  # a crash would leave it too: it has no manifest
            delete_checkpoint(folder)
        raise
    snapshot.close()
    return folder


def delete_checkpoint(folder: Path) -> None:
    """Remove a checkpoint, the manifest first: after a crash the rest is not a checkpoint."""
    if (folder / MANIFEST_NAME).exists():
        remove(folder / MANIFEST_NAME)
        sync_folder(folder)
    remove_folder(folder)


def require_space(parent: Path, parts: Parts) -> None:
    """Raise DiskFull unless the disk has room for a checkpoint."""
    there = existing(parent)
    free, spare = free_disk_bytes(there), spare_bytes(parts)
    if free < parts.num_bytes + spare:
        raise DiskFull(
            f"{there} has {gib(free)} free; a checkpoint needs {gib(parts.num_bytes)}, and "
            f"{gib(spare)} more are reserved for logs. Free space, or set save.dir to a larger disk"
        )


def spare_bytes(parts: Parts) -> int:
    """Return what must be free beside a checkpoint."""
    return min(MOST_SPARE_BYTES, (1 << 20) + parts.num_bytes // 16)


def existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _write_files(
    folder: Path, parts: Parts, snapshot: Snapshot, advance: Advance
) -> dict[str, FileRecord]:
    """Write all files; return their sizes and hashes once they are on stable storage."""
    finishing: list[tuple[str, int, DirectWriter, Future[None]]] = []
    with WriteQueue() as carrier:
        for block in snapshot.order:
            snapshot.wait(block)
            writers = []
            try:
                for file in parts.blocks[block]:
                    writers.append((file, file.fill(folder / file.name, carrier, advance)))
                snapshot.let_go(block)
            except BaseException:
                for _, writer in writers:
                    writer.abandon()
                raise
            for file, writer in writers:
                finishing.append((file.name, file.num_bytes, writer, writer.finish_later()))
            _raise_failures(finishing)
        records = {}
        for name, num_bytes, writer, future in finishing:
            future.result()
            records[name] = FileRecord.of_digests(num_bytes, writer.digests)
    for name, data in parts.small.items():
        write_file(folder / name, data)
        records[name] = FileRecord.of_bytes(data)
    return records


def _raise_failures(finishing: list[tuple[str, int, DirectWriter, Future[None]]]) -> None:
    """Stop as soon as a file fails, for example because the disk is full."""
    for _, _, _, future in finishing:
        if future.done():
            future.result()
