"""Saving a checkpoint: afterwards it is complete, or it is not there.

    mkdir step-N-id, fsync parent -> files, each hashed on the way and fsynced -> fsync folders
    -> manifest under another name, fsync -> rename -> fsync folder: the checkpoint is acknowledged

Every file is new and the manifest comes last, so a crash at any instant leaves a folder without a
manifest, which readers ignore, or a complete checkpoint.

Ranks that share a store save together: one folder with the files of one process. The files of a
block are written by one rank, which gets the parts of the others while they hold the block; ranks
take turns, block by block. The first rank makes the folder, and writes the manifest when all have
said that their files are on stable storage.

Storage may stall: a file call that does not return. Calls are made by threads of their own
(memory/file_calls.py), so that a rank whose call hangs still talks to the others. It fails, and
with it the save on all ranks. What hangs can change nothing but files of the folder that was given
up, and that folder is deleted once it has returned.

Laws (tests/disk/checkpoint/test_save.py, tests/disk/checkpoint/test_save_ranks.py)
    1. A failure at any call leaves no folder behind, and older checkpoints as they were.
    2. A block is held no longer than it takes to copy it into the writer's buffers.
    3. Memory grows by the buffers of the queue, not by the state.
    4. The bytes of a checkpoint do not depend on how many ranks have saved it.
    5. A save is acknowledged on all ranks, or fails on all of them.
    6. Storage that stalls on one rank fails the save on all of them, within the limit of `calls`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatrain.disk.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest, record_of
from megatrain.disk.checkpoint.parts import Parts
from megatrain.disk.hf.joint_files import JointFiles
from megatrain.disk.hf.weights_file import WeightsFile
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
from megatrain.memory.file_calls import FileCalls
from megatrain.memory.ledger import gib
from megatrain.progress import Advance
from megatrain.ranks.agreement import Agreement
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import ALONE, Ranks

FOLDERS = ("model", "state")
MOST_SPARE_BYTES = 64 << 20
"""For the manifest, the file system's own bookkeeping, and the log of the run."""


def write_checkpoint(
    parent: Path,
    parts: Parts,
    snapshot: Snapshot,
    training: Mapping[str, Any],
    advance: Advance = lambda num_bytes: None,
    ranks: Ranks = ALONE,
    calls: FileCalls | None = None,
) -> Path:
    """Write a checkpoint into a new folder of `parent`, and return the folder: it is acknowledged.

    All ranks call it for the same step, and all return or raise alike; `training` is that of the
    first. Raises DiskError or SnapshotLost, and then nothing is left of it; or RankLost. After
    StorageTimeout `calls.out` tells whether something is left. Closes the snapshot.
    """
    if calls is None:
        calls = FileCalls()
        try:
            return write_checkpoint(parent, parts, snapshot, training, advance, ranks, calls)
        finally:
            calls.close()
    step, name = snapshot.num_steps, f"step-{snapshot.num_steps:08}-{secrets.token_hex(4)}"
    try:
        with Agreement(ranks.carrier.agree) as agreement:
            ranks.on_first(lambda: calls.do(lambda: _make_folders(parent, name, parts)))
            folder = parent / str(agreement.settle(facts={"folder": name})[0]["folder"])
            records = _write_files(folder, parts, snapshot, advance, ranks, agreement, calls)
            complete = partial(_complete, folder, parts, step, training, records)
            ranks.on_first(lambda: calls.do(complete))
    except BaseException:
        snapshot.close()
        ranks.on_first(lambda: _delete_failed(parent / name, calls))
        raise
    snapshot.close()
    return folder


def _make_folders(parent: Path, name: str, parts: Parts) -> None:
    require_space(parent, parts)
    make_folder(parent)
    make_new_folder(parent / name)
    for each in FOLDERS:
        make_new_folder(parent / name / each)


def _delete_failed(folder: Path, calls: FileCalls) -> None:
    """Delete what a save leaves that failed; on storage that has stalled, afterwards."""
    if calls.is_given_up:  # a call that hangs may be that of the manifest
        calls.afterwards(lambda: delete_checkpoint(folder))
        return
    with suppress(DiskError):  # a crash would leave it too: it has no manifest
        calls.do(lambda: delete_checkpoint(folder))


def _complete(
    folder: Path,
    parts: Parts,
    step: int,
    training: Mapping[str, Any],
    records: dict[str, FileRecord],
) -> None:
    """Write the small files and then the manifest, over the `records` of all others."""
    for name, data in parts.small.items():
        write_file(folder / name, data)
        records[name] = FileRecord.of_bytes(data)
    _sync(folder)
    sync_folder(folder)
    manifest = Manifest(step=step, files=records, model=parts.model, training=training)
    write_file(folder / MANIFEST_NAME, manifest.to_bytes())


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
    folder: Path,
    parts: Parts,
    snapshot: Snapshot,
    advance: Advance,
    ranks: Ranks,
    agreement: Agreement,
    calls: FileCalls,
) -> dict[str, FileRecord]:
    """Write the files of all blocks, as far as they are this rank's.

    Returns the sizes and hashes of the files of all ranks, once they are on stable storage.
    """
    finishing: list[_Finishing] = []
    with WriteQueue(calls) as queue:
        joint = JointFiles(ranks, queue, advance)
        for block in snapshot.order:
            finishing.extend(_write_block(folder, parts, snapshot, block, joint, ranks.owner))
            joint.attempt(lambda: _raise_failures(finishing))
            if not agreement.all_well(joint.failure):
                snapshot.close()  # training need not wait for what is left to do
                break  # for example because a disk is full
        else:
            finishing.extend(_write_carried(folder, parts, joint))
        records = joint.attempt(lambda: _records(finishing, calls)) or {}
    if not ranks.owner.leads:
        joint.attempt(lambda: calls.do(lambda: _sync(folder)))
    # Nobody writes any more, so that the first may delete the folder.
    said = agreement.settle(joint.failure, {n: record.to_json() for n, record in records.items()})
    return {name: record_of(value) for of_rank in said for name, value in of_rank.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finishing:
    """A file whose bytes are in the queue."""

    file: WeightsFile
    writer: DirectWriter
    done: Future[None]


def _records(finishing: list[_Finishing], calls: FileCalls) -> dict[str, FileRecord]:
    """Return the files' records once they are on stable storage. Raises DiskError."""
    records = {}
    for one in finishing:
        calls.result(one.done)
        digests = one.writer.digests
        records[one.file.name] = FileRecord.of_digests(one.file.num_bytes, digests)
    return records


def _write_block(
    folder: Path, parts: Parts, snapshot: Snapshot, block: int, joint: JointFiles, owner: Owner
) -> list[_Finishing]:
    """Write a block's files, or help the rank that does, while the block is held."""
    writers: list[tuple[WeightsFile, DirectWriter]] = []
    try:
        joint.attempt(lambda: snapshot.wait(block))
        for file in parts.blocks[block]:
            writer = joint.write(file, folder / file.name, block % owner.size)
            if writer is not None:
                writers.append((file, writer))
        joint.attempt(lambda: snapshot.let_go(block))
        if joint.failure is None:
            return [
                _Finishing(file=file, writer=writer, done=writer.finish_later())
                for file, writer in writers
            ]
    except BaseException:
        for _, writer in writers:
            writer.abandon()
        raise
    for _, writer in writers:
        writer.abandon()
    return []


def _write_carried(folder: Path, parts: Parts, joint: JointFiles) -> list[_Finishing]:
    """Copy what the model carries, when all blocks are free again. The first rank writes it."""
    written = []
    for file in parts.carried:
        writer = joint.write(file, folder / file.name, rank=0)
        if writer is not None:
            written.append(_Finishing(file=file, writer=writer, done=writer.finish_later()))
    return written


def _sync(folder: Path) -> None:
    for each in FOLDERS:
        sync_folder(folder / each)


def _raise_failures(finishing: list[_Finishing]) -> None:
    """Raise what a file has failed with so far."""
    for one in finishing:
        if one.done.done():
            one.done.result()
