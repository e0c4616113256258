"""Checkpoints on their way into a bucket: chunk by chunk, each under its hash, the entry last.

    chunks/LEASE/DIGEST              what is not in a kept checkpoint already
    checkpoints/LEASE/NAME.json      the files, with the chunks of each
    history/NUMBER.json              by a conditional put: acknowledged (history.py)
    only then what no kept checkpoint needs any more is deleted

Chunks are those of the local manifest. One that a kept checkpoint has is not sent again, so frozen
weights, tokenizers and the lines of earlier steps go once. The name of a chunk has the number of
the lease that it was written under: a process that was taken over deletes and replaces nothing that
its successor has written.

Laws (tests/disk/remote/test_upload.py)
    1. Every chunk and list that the history names is there, at every instant, whatever fails.
    2. What is sent is what changed: the chunks that no kept checkpoint has, the list and the entry.
    3. A chunk whose bytes differ from its hash on this disk is not sent: CheckpointCorrupted.
    4. An upload that failed is continued: what was sent stays sent.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from megatrain.disk.checkpoint.manifest import (
    MANIFEST_NAME,
    FileRecord,
    parse_manifest,
    record_of,
    signed,
    unsigned,
)
from megatrain.disk.remote.history import Lease, RemoteCheckpoint
from megatrain.errors import CheckpointCorrupted, DiskError, StorageError
from megatrain.files import drop_cache
from megatrain.memory.direct import CHUNK_BYTES, digest
from megatrain.places import Place, is_key
from megatrain.progress import Advance

AT_A_TIME = 4
"""Chunks that are sent or fetched at the same time: as much memory is taken."""
CHECKPOINT = "checkpoint"
RUN = "run"
"""The two folders of an index: the files of the checkpoint, and those of the run beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file in a bucket."""

    record: FileRecord
    leases: tuple[int, ...]
    """The lease that each chunk was written under."""

    def chunk_keys(self) -> list[str]:
        """Return the objects of its chunks, in order."""
        pairs = zip(self.leases, self.record.digests, strict=True)
        return [chunk_key(lease, name) for lease, name in pairs]


Index = Mapping[str, RemoteFile]
"""The files of a checkpoint and of its run by name, like `checkpoint/model/config.json`."""


def chunk_key(lease: int, name: str) -> str:
    return f"chunks/{lease:08}/{name}"


def read_index(place: Place, checkpoint: RemoteCheckpoint) -> dict[str, RemoteFile]:
    """Return the files of a checkpoint. Raises CheckpointCorrupted or StorageError."""
    where, data = f"{place.url}/{checkpoint.key}", place.read(checkpoint.key)
    if data is None:
        raise CheckpointCorrupted(f"{where} is missing")
    if hashlib.sha256(data).hexdigest() != checkpoint.sha256:
        raise CheckpointCorrupted(f"{where} has changed since it was written")
    try:
        fields = json.loads(unsigned(data, where))["files"]
        return {
            str(name): RemoteFile(record=record_of(one), leases=tuple(map(int, one["leases"])))
            for name, one in fields.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupted(f"{where} is no list of files: {str(error)[:200]}") from None


def is_run_file(name: str) -> bool:
    """Return whether a file of a run folder goes along: any with a plain name, also a user's."""
    return is_key(name) and "/" not in name


class HeldCheckpoint:
    """A local checkpoint with all its files open: deleting it does not take them away."""

    def __init__(self, folder: Path, run: Path) -> None:
        """Raises DiskError or CheckpointCorrupted if it is not complete."""
        self.folder = folder
        self._stack = ExitStack()
        try:
            self._open(run)
        except OSError as error:
            self.close()
            raise DiskError(f"cannot read {folder}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def _open(self, run: Path) -> None:
        manifest_file = self._stack.enter_context((self.folder / MANIFEST_NAME).open("rb"))
        data = manifest_file.read()
        self.manifest = parse_manifest(data, str(self.folder / MANIFEST_NAME))
        self.files: dict[str, tuple[BinaryIO, FileRecord]] = {}
        for name, record in self.manifest.files.items():
            file = self._stack.enter_context((self.folder / name).open("rb"))
            self.files[f"{CHECKPOINT}/{name}"] = file, record
        self.files[f"{CHECKPOINT}/{MANIFEST_NAME}"] = manifest_file, FileRecord.of_bytes(data)
        lines = self.manifest.training.get("lines", {})
        for path in sorted(run.iterdir()):
            if path.is_file() and not path.is_symlink() and is_run_file(path.name):
                file = self._stack.enter_context(path.open("rb"))
                record = _recorded(file, lines.get(path.name))
                self.files[f"{RUN}/{path.name}"] = file, record

    @property
    def num_bytes(self) -> int:
        return sum(record.num_bytes for _, record in self.files.values())

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _recorded(file: BinaryIO, num_bytes: int | None) -> FileRecord:
    """Return the record of the first `num_bytes` of a file; None: all."""
    size = os.fstat(file.fileno()).st_size
    size = size if num_bytes is None else min(size, num_bytes)
    starts = range(0, size, CHUNK_BYTES)
    hashes = tuple(digest(_read(file, start, size)) for start in starts)
    return FileRecord(num_bytes=size, digests=hashes)


def _read(file: BinaryIO, start: int, end: int) -> memoryview:
    """Return a chunk in pages of its own, which the system has back when it is sent.

    malloc would keep as much for each thread that has ever sent one.
    """
    size = min(CHUNK_BYTES, end - start)
    pages = memoryview(mmap.mmap(-1, size))
    count = os.preadv(file.fileno(), [pages], start)
    drop_cache(file.fileno(), start, size)
    return pages[:count]


@dataclass(slots=True, kw_only=True)
class Sent:
    """Bytes and chunks of an upload."""

    num_bytes: int = 0
    num_chunks: int = 0
    known_bytes: int = 0
    """Bytes that the bucket had already."""


@dataclass(slots=True, kw_only=True)
class Uploader:
    """Sends checkpoints of one run into its bucket, one after another."""

    lease: Lease
    keep: int
    keep_best: bool
    _known: dict[str, int] = field(default_factory=dict)
    """The lease of each chunk that is there, by digest: of kept checkpoints, or of this process."""
    _indexes: dict[RemoteCheckpoint, Index] = field(default_factory=dict)
    _is_tidy: bool = False
    is_stopped: bool = False
    """Whether nothing more is to be sent."""

    def upload(self, held: HeldCheckpoint, advance: Advance = lambda num_bytes: None) -> Sent:
        """Send a checkpoint; when it returns, it is acknowledged.

        Raises StorageError, after which it may be called again; CheckpointCorrupted, DiskError,
        RunTaken.
        """
        self._learn()
        sent, manifest = Sent(), held.manifest
        index = self._send_chunks(held, sent, advance)
        data = _index_bytes(index)
        checkpoint = RemoteCheckpoint(
            name=held.folder.name,
            step=manifest.step,
            lease=self.lease.number,
            sha256=hashlib.sha256(data).hexdigest(),
            eval_loss=manifest.training.get("eval_loss"),
        )
        self.lease.place.write(checkpoint.key, data)
        sent.num_bytes += len(data)
        live = kept([checkpoint, *self.lease.live], self.keep, keep_best=self.keep_best)
        dropped = [one for one in self.lease.live if one not in live]
        self.lease.commit(live)
        self._indexes[checkpoint] = index
        self._forget(dropped)
        return sent

    def has(self, name: str) -> bool:
        """Return whether a checkpoint of this name is acknowledged."""
        return any(one.name == name for one in self.lease.live)

    def _learn(self) -> None:
        """Read which chunks kept checkpoints have, once."""
        for one in self.lease.live:
            if one in self._indexes:
                continue
            with suppress(CheckpointCorrupted):  # its chunks are sent again
                self._indexes[one] = read_index(self.lease.place, one)
                self._known |= _chunks(self._indexes[one])

    def _send_chunks(
        self, held: HeldCheckpoint, sent: Sent, advance: Advance
    ) -> dict[str, RemoteFile]:
        work: dict[str, Callable[[], int]] = {}
        for name, (file, record) in held.files.items():
            for number, expected in enumerate(record.digests):
                start = number * CHUNK_BYTES
                num_bytes = min(CHUNK_BYTES, record.num_bytes - start)
                if expected in self._known or expected in work:
                    sent.known_bytes += num_bytes
                    advance(num_bytes)
                    continue
                work[expected] = _Chunk(self, name, file, start, record, expected, advance)
        for name, num_bytes in each_done(work):
            self._known[name] = self.lease.number
            sent.num_bytes += num_bytes
            sent.num_chunks += 1
        return {
            name: RemoteFile(record=record, leases=tuple(self._known[d] for d in record.digests))
            for name, (_, record) in held.files.items()
        }

    def _forget(self, dropped: list[RemoteCheckpoint]) -> None:
        """Delete what no kept checkpoint needs; a bucket that fails may keep some of it."""
        for one in dropped:
            self._indexes.pop(one, None)
        if any(one not in self._indexes for one in self.lease.live):
            return  # damaged: some of its chunks may be right, and stay
        needed = {one.key for one in self.lease.live}
        for one in self.lease.live:
            needed.update(key for file in self._indexes[one].values() for key in file.chunk_keys())
        known = {name: chunk_key(lease, name) for name, lease in self._known.items()}
        self._known = {n: lease for n, lease in self._known.items() if known[n] in needed}
        keys = [one.key for one in dropped] + [key for key in known.values() if key not in needed]
        with suppress(StorageError):
            if not self._is_tidy:
                keys += self._remains(needed)
            for key in keys:
                self.lease.require()
                self.lease.place.delete(key)
            self._is_tidy = True

    def _remains(self, needed: set[str]) -> list[str]:
        """Return what earlier processes have sent and never acknowledged, by a listing."""
        found = [*self.lease.place.listed("chunks"), *self.lease.place.listed("checkpoints")]
        return [
            one.key
            for one in found
            if one.key not in needed and _lease_of(one.key) < self.lease.number
        ]


def _lease_of(key: str) -> int:
    number = key.split("/")[1] if key.count("/") > 1 else ""
    return int(number) if number.isdecimal() else 1 << 60


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk to send."""

    uploader: Uploader
    name: str
    file: BinaryIO
    start: int
    record: FileRecord
    expected: str
    advance: Advance

    def __call__(self) -> int:
        """Send it; return its bytes."""
        self.uploader.lease.require()
        if self.uploader.is_stopped:
            raise StorageError("the upload was stopped")
        data = _read(self.file, self.start, self.record.num_bytes)
        if digest(data) != self.expected:
            raise CheckpointCorrupted(
                f"{self.name}: bytes {self.start} to {self.start + len(data)} do not match their "
                "hash: they have changed on this disk since the save, and are not uploaded"
            )
        key = chunk_key(self.uploader.lease.number, self.expected)
        self.uploader.lease.place.write(key, data)
        self.advance(len(data))
        return len(data)


def each_done(work: Mapping[str, Callable[[], Any]]) -> Any:
    """Do the work on AT_A_TIME threads; yield names and results as they come.

    The first failure is raised when the work that has begun is done.
    """
    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="place") as pool:
        waiting: dict[Future[Any], str] = {}
        left = iter(work.items())
        failure: BaseException | None = None
        while True:
            while failure is None and len(waiting) < AT_A_TIME:
                if (one := next(left, None)) is None:
                    break
                waiting[pool.submit(one[1])] = one[0]
            if not waiting:
                break
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                name = waiting.pop(future)
                if (error := future.exception()) is None:
                    yield name, future.result()
                else:
                    failure = failure or error
        if failure is not None:
            raise failure


def kept(
    checkpoints: list[RemoteCheckpoint], keep: int, *, keep_best: bool
) -> tuple[RemoteCheckpoint, ...]:
    """Return the newest `keep` of the checkpoints and, if asked, the best.

    The first was just made and stays. One of a name replaces others of that name, and one of a
    step those of that step: a run that was taken over has come there again.
    """
    first = checkpoints[0]
    others = [one for one in checkpoints[1:] if one.step != first.step]
    found = sorted([first, *others], key=lambda one: one.step, reverse=True)
    stays = {first, *found[:keep]}
    if keep_best:
        judged = [one for one in found if one.eval_loss is not None]
        stays.update(sorted(judged, key=lambda one: (one.eval_loss or 0.0, -one.step))[:1])
    return tuple(one for one in found if one in stays)


def _chunks(index: Index) -> dict[str, int]:
    return {
        name: lease
        for file in index.values()
        for name, lease in zip(file.record.digests, file.leases, strict=True)
    }


def _index_bytes(index: Index) -> bytes:
    files = {
        name: file.record.to_json() | {"leases": list(file.leases)}
        for name, file in sorted(index.items())
    }
    return signed(json.dumps({"files": files}, indent=1).encode())
