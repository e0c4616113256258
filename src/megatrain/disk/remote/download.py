"""A checkpoint in a bucket, brought onto a machine that does not have it.

Only what a resume needs is read: the last entry of the history, the list of files, and the chunks,
each compared with its hash. Files are durable before the manifest appears, as in a save, so that a
machine that dies in the middle leaves a folder that readers ignore.

Laws (tests/disk/remote/test_upload.py)
    1. The files are those that were saved, byte for byte, or the folder is no checkpoint.
    2. A chunk that is missing or differs is CheckpointCorrupted, which names the file and the
       chunk.
    3. Files that are here are not read again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megatrain.cache import cache_full
from megatrain.disk.checkpoint.manifest import MANIFEST_NAME, FileRecord
from megatrain.disk.checkpoint.save import FOLDERS, delete_checkpoint
from megatrain.disk.remote.history import RemoteCheckpoint, last_entry
from megatrain.disk.remote.upload import (
    CHECKPOINT,
    RUN,
    RemoteFile,
    each_done,
    is_run_file,
    read_index,
)
from megatrain.errors import CheckpointCorrupted, RunFolderError
from megatrain.files import (
    free_disk_bytes,
    make_folder,
    make_new_folder,
    sync_folder,
    write_chunks,
    write_file,
)
from megatrain.memory.direct import CHUNK_BYTES, digest
from megatrain.places import Place
from megatrain.progress import Advance, byte_progress
from megatrain.text import size

_CHECKPOINT_FILE = re.compile(r"(model|state)/[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}|manifest\.json")
_NAME = re.compile(r"step-\d{8,}-[0-9a-f]{8}")


def bring(place: Place, checkpoint: RemoteCheckpoint, parent: Path, run: Path | None) -> Path:
    """Write a checkpoint into its folder of `parent`, and the files of its run into `run`.

    Returns the folder. Raises CheckpointCorrupted, StorageError or DiskError.
    """
    index = read_index(place, checkpoint)
    files = _part(index, CHECKPOINT, _is_checkpoint_file)
    folder = parent / checkpoint.name
    if not _NAME.fullmatch(checkpoint.name) or MANIFEST_NAME not in files:
        raise CheckpointCorrupted(f"{place.url}/{checkpoint.key} is no checkpoint of ours")
    if not (folder / MANIFEST_NAME).exists():
        make_folder(parent)
        total = sum(file.record.num_bytes for file in files.values())
        if (free := free_disk_bytes(parent)) < total + (64 << 20):
            raise cache_full(
                f"{place.url}: its checkpoint of {size(total)} needs more than the {size(free)} "
                f"that are free in {parent}"
            )
        delete_checkpoint(folder)
        make_new_folder(folder)
        for name in FOLDERS:
            make_new_folder(folder / name)
        with byte_progress(f"fetching {checkpoint.name}", total) as advance:
            for name, file in files.items():
                if name != MANIFEST_NAME:
                    _bring_file(place, folder / name, file, advance)
        for name in FOLDERS:
            sync_folder(folder / name)
        sync_folder(folder)
        write_file(folder / MANIFEST_NAME, read_remote(place, files[MANIFEST_NAME]))
    for name, file in ({} if run is None else _part(index, RUN, is_run_file)).items():
        assert run is not None
        write_file(run / name, read_remote(place, file), durable=False)
    return folder


def run_file(place: Place, name: str) -> bytes | None:
    """Return a file of the run at a place, as of its newest checkpoint; None without one.

    Raises StorageError, CheckpointCorrupted, or RunFolderError if there is no run.
    """
    last = last_entry(place)
    if last is None:
        raise RunFolderError(f"{place.url}: there is no run here.")
    for checkpoint in last.live[:1]:
        file = read_index(place, checkpoint).get(f"{RUN}/{name}")
        return None if file is None else read_remote(place, file)
    return None


def _is_checkpoint_file(name: str) -> bool:
    return _CHECKPOINT_FILE.fullmatch(name) is not None and ".." not in name


def _part(
    index: dict[str, RemoteFile], top: str, is_right: Callable[[str], bool]
) -> dict[str, RemoteFile]:
    """Return the files below `top`. No name leads out of the folder: others raise."""
    found = {
        name.removeprefix(f"{top}/"): file
        for name, file in index.items()
        if name.startswith(f"{top}/")
    }
    if odd := [name for name in found if not is_right(name)]:
        raise CheckpointCorrupted(f"{odd[0][:100]!r} is not a file of a checkpoint")
    return found


def _bring_file(place: Place, path: Path, file: RemoteFile, advance: Advance) -> None:
    """Write a file, its chunks in any order as they come."""
    with write_chunks(path, file.record.num_bytes) as write:

        def one(number: int, key: str) -> None:
            data = _chunk(place, key, file.record, number)
            write(data, number * CHUNK_BYTES)
            advance(len(data))

        work = {
            str(number): partial(one, number, key) for number, key in enumerate(file.chunk_keys())
        }
        for _ in each_done(work):
            pass


def read_remote(place: Place, file: RemoteFile) -> bytes:
    """Return a small file. Raises CheckpointCorrupted or StorageError."""
    keys = enumerate(file.chunk_keys())
    return b"".join(_chunk(place, key, file.record, number) for number, key in keys)


def _chunk(place: Place, key: str, record: FileRecord, number: int) -> bytes:
    data = place.read(key)
    if data is None:
        raise CheckpointCorrupted(f"{place.url}/{key} is missing")
    if digest(memoryview(data)) != record.digests[number]:
        data = place.read(key) or b""  # a connection may have changed it
        if digest(memoryview(data)) != record.digests[number]:
            raise CheckpointCorrupted(f"{place.url}/{key} does not match its hash")
    return data
