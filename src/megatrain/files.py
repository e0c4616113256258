"""All changes to files: durable writes, renames, locks.

A file that must survive a crash is written under a temporary name, made durable by fsync, given its
name by a rename, and the name is made durable by an fsync of the folder. An fsync that failed is
never tried again on the same file: the kernel may have dropped the bytes and would report success.

All calls are made as `os.name(...)`, so that a test can replace this module's `os` and let the k-th
call fail, or record their order.

Laws (tests/test_files.py, tests/disk/checkpoint/test_faults.py)
    1. `write_file` leaves the old bytes or the new, after a failure of any call.
    2. No temporary file outlives a failure that was reported.
    3. `clear_remains` removes what a killed process left, and nothing that one still writes.
    4. No file is written through a link: one that exists is opened with O_NOFOLLOW, a new one with
       O_EXCL, and a rename replaces the link.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from megatrain.errors import ConfigError, DiskError, DiskFull, RunFolderError

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_HEAD_BYTES = 1 << 14
_PIECE_BYTES = 8 << 20
_MOST_NAME_BYTES, _MOST_PATH_BYTES = 255, 4095
_REMAINS_S = 3600.0
"""So long nothing is written to a temporary file before it can be a remnant."""
_CALLS: dict[int, tuple[str, float]] = {}
"""The call that each thread is in, and the time of its last progress."""


def is_too_long(name: str) -> bool:
    """Return whether no file can have this name: asking the system for it would be an OSError."""
    longest = max(len(os.fsencode(part)) for part in name.split("/"))
    return longest > _MOST_NAME_BYTES or len(os.fsencode(name)) > _MOST_PATH_BYTES


def open_direct(path: Path, flags: int) -> tuple[int, bool]:
    """Return a descriptor, and whether it bypasses the page cache (not all systems can)."""
    flags |= os.O_CLOEXEC
    if flags & os.O_CREAT:
        flags |= os.O_NOFOLLOW
    if _O_DIRECT:
        try:
            return os.open(path, flags | _O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # no direct I/O: tmpfs and some network systems
                raise
            flags &= ~os.O_EXCL  # the refused call may have created the file
    return os.open(path, flags, 0o644), False


def reserve(fd: int, num_bytes: int) -> None:
    """Reserve disk space for a new file, so that a full disk shows before any byte is written."""
    if num_bytes and hasattr(os, "posix_fallocate"):  # macOS has none: a full disk shows later
        os.posix_fallocate(fd, 0, num_bytes)


def drop_cache(fd: int, start: int = 0, num_bytes: int = 0) -> None:
    """Let the system forget its copy of a range that was read or written; 0 is to the end."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(fd, start, num_bytes, os.POSIX_FADV_DONTNEED)


def write_at(fd: int, memory: memoryview, offset: int) -> None:
    """Write all of `memory`; one call may write less than all."""
    while memory:
        count = os.pwrite(fd, memory, offset)
        if count == 0:
            raise OSError(errno.EIO, "the system wrote 0 bytes and reported no error")
        memory, offset = memory[count:], offset + count


def read_at(fd: int, memory: memoryview, offset: int) -> int:
    """Read into `memory`; return the number of bytes read, 0 at the end of the file."""
    return os.preadv(fd, [memory], offset)


def finish(fd: int, num_bytes: int) -> None:
    """Cut a file to size and wait until its bytes are on stable storage."""
    os.ftruncate(fd, num_bytes)
    os.fsync(fd)


def close(fd: int) -> None:
    os.close(fd)


def send_to_nowhere(fd: int) -> None:
    """Discard everything written to a descriptor from now on, buffered data included."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)


def temporary_name(path: Path) -> Path:
    """Return an unused name beside `path` that no reader takes for a result."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


def clear_remains(folder: Path, name: str | None = None) -> None:
    """Remove temporary files and folders that processes left in `folder` when they were killed.

    With a `name`, those for that name alone. They were not written to for an hour, and no process
    holds a file of them (`open_new`). The hour is for file systems that several hosts see, where
    locks may be those of one host.
    """
    names = "*" if name is None else glob.escape(name)
    for path in folder.glob(f".{names}.{'[0-9a-f]' * 8}.tmp"):
        with suppress(OSError, DiskError):  # another process removes it too
            parts = [path, *path.rglob("*")]
            idle_s = time.time() - max(part.lstat().st_mtime for part in parts)
            if idle_s > _REMAINS_S and not any(map(_is_held, parts)):
                remove_folder(path)


def _is_held(path: Path) -> bool:
    """Return whether a process writes to a file, as far as the system tells."""
    if path.is_symlink() or not path.is_file():
        return False
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or there are no locks here
        return True
    finally:
        os.close(fd)
    return False


def _hold(fd: int) -> None:
    """Show others that somebody writes to a file, until it is closed."""
    with suppress(OSError):  # no locks here
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_file(path: Path, data: bytes | memoryview, *, durable: bool = True) -> None:
    """Write `data` to `path`. After a crash at any instant it has the old bytes or the new.

    Not `durable`: readers never see a partial file, but a power loss may leave one.
    """
    temporary = temporary_name(path)
    try:
        with explained("write", path):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                _hold(fd)
                write_at(fd, memoryview(data), 0)
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, path)
    except FileNotFoundError as error:
        raise DiskError(f"cannot write {path}: the folder {path.parent} does not exist") from error
    except BaseException:
        with suppress(DiskError):  # the first failure is the one to report
            remove(temporary)
        raise
    if durable:
        sync_folder(path.parent)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, durably. After a crash at any instant `target` has its old bytes or the new."""
    temporary = temporary_name(target)
    try:
        with explained("copy to", target), source.open("rb") as file:
            with open_new(temporary) as copy:
                while piece := file.read(_PIECE_BYTES):
                    copy.write(piece)
                copy.flush()
                os.fsync(copy.fileno())
            os.replace(temporary, target)
    except BaseException:
        with suppress(DiskError):
            remove(temporary)
        raise
    sync_folder(target.parent)


def write_new(path: Path, data: bytes) -> bool:
    """Write `data` to `path` unless it exists, durably; return whether this call has made it.

    Of several callers one makes it, and no reader sees a part of it.
    """
    temporary = temporary_name(path)
    try:
        with explained("create", path):
            with open_new(temporary) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
    finally:
        with suppress(DiskError):
            remove(temporary)
    sync_folder(path.parent)
    return True


@contextmanager
def write_chunks(path: Path, num_bytes: int) -> Iterator[Callable[[bytes, int], None]]:
    """Make a new file of `num_bytes`; yield what writes some bytes at an offset, from any thread.

    When the block ends, the bytes are on stable storage. Sync the folder for the name.
    """
    with explained("write", path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _hold(fd)
            reserve(fd, num_bytes)
            yield lambda data, offset: write_at(fd, memoryview(data), offset)
            finish(fd, num_bytes)
            drop_cache(fd)
        finally:
            os.close(fd)


def require_replaceable(path: Path, signs: Sequence[bytes]) -> None:
    """Raise ConfigError if `path` exists and is not a file with our `signs` near its start."""
    try:
        if not os.path.lexists(path):
            return
        head = b""
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {error.strerror}") from error
    if not all(sign in head for sign in signs):
        raise ConfigError(f"{path} exists and was not written by megatrain. Give another name.")


def open_new(path: Path) -> BinaryIO:
    """Return a new file to write to, held until it is closed.

    Raises FileExistsError if the name is taken.
    """
    with explained("create", path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        _hold(fd)
        return os.fdopen(fd, "wb")


def close_durably(file: BinaryIO) -> None:
    """Close a file whose bytes must be on disk before the rename that names them."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _open_no_link(path: Path, flags: int) -> int:
    """Open a file for writing, which may be there. Raises DiskError for a link: none is followed.

    A stranger's run folder may have a link where we write: what it points to would change.
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if not path.is_symlink():
            raise
        raise DiskError(
            f"{path} is a link to {os.readlink(path)}, and no link is followed for writing. Remove "
            "the link, or put the file itself in its place."
        ) from error


def append(path: Path, data: bytes, start: int | None = None) -> None:
    """Append `data` to a file, creating it if needed.

    `start` is the length before an append that failed, which may have left a partial record.
    """
    with explained("write", path):
        fd = _open_no_link(path, os.O_WRONLY | os.O_CREAT)
        try:
            write_at(fd, memoryview(data), os.fstat(fd).st_size if start is None else start)
        finally:
            os.close(fd)


def cut(path: Path, num_bytes: int) -> None:
    """Shorten a file to `num_bytes`, durably; a shorter or missing file is left unchanged."""
    with suppress(FileNotFoundError), explained("cut", path):
        fd = _open_no_link(path, os.O_WRONLY)
        try:
            if os.fstat(fd).st_size > num_bytes:
                finish(fd, num_bytes)
        finally:
            os.close(fd)


def sync_file(path: Path) -> int:
    """Make a file's bytes durable; return their number, 0 if there is no file."""
    try:
        with explained("sync", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
                return os.fstat(fd).st_size
            finally:
                os.close(fd)
    except FileNotFoundError:
        return 0


def rename(source: Path, target: Path) -> None:
    """Rename `source` to `target`, replacing a file that exists, and make the name durable."""
    with explained("rename to", target):
        os.replace(source, target)
    sync_folder(target.parent)


def remove(path: Path) -> None:
    """Remove a file if it exists."""
    with suppress(FileNotFoundError), explained("remove", path):
        os.unlink(path)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, durably; an existing one is made durable too.

    Raises DiskError, also where one of them is a link to a place that does not exist.
    """
    missing = [p for p in (path, *path.parents) if not p.exists()]
    there = missing[-1].parent if missing else path
    if os.access(there.parent, os.R_OK):
        sync_folder(there.parent)  # its creator may have been killed before this
    for folder in reversed(missing):
        with suppress(FileExistsError):
            make_new_folder(folder)
        if folder.is_symlink() and not folder.exists():
            place = os.readlink(folder)
            raise DiskError(
                f"cannot create the folder {path}: {folder} is a link to {place}, which "
                "is not there"
            )


def make_new_folder(path: Path) -> None:
    """Create a folder, durably. Raises FileExistsError if the name is taken."""
    try:
        with explained("create the folder", path):
            os.mkdir(path)
    finally:
        if path.exists():
            sync_folder(path.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder and its contents, if it exists. Links are removed, never followed."""
    if path.is_symlink() or not path.is_dir():
        remove(path)
        return
    with explained("remove", path):
        names = os.listdir(path)
    for name in names:
        remove_folder(path / name)
    with suppress(FileNotFoundError), explained("remove", path):
        os.rmdir(path)


def point(link: Path, target: str) -> None:
    """Make `link` a link to `target`, replacing an existing link."""
    temporary = temporary_name(link)
    try:
        with explained("link", link):
            os.symlink(target, temporary)
            os.replace(temporary, link)
    except BaseException:
        with suppress(DiskError):
            remove(temporary)
        raise


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    with explained("sync the folder", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def free_disk_bytes(path: Path) -> int:
    """Return the number of free bytes on the disk of `path`."""
    with explained("get the free space of", path):
        status = os.statvfs(path)
    return int(status.f_bavail * status.f_frsize)


def lock(path: Path) -> int:
    """Return a descriptor that locks `path` for this process until it is closed.

    Raises RunFolderError if another process holds it. The file names it.
    """
    with explained("lock", path):
        fd = _open_no_link(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise RunFolderError(
                f"{path.parent}: another process{f' ({holder})' if holder else ''} is writing to "
                "this run. Wait for it, or set save.dir to another folder."
            ) from None
        except BaseException:
            os.close(fd)
            raise
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        except OSError:
            pass  # a full disk: the lock still works, only its holder is not named
    return fd


def call_of(thread: int) -> tuple[str, float] | None:
    """Return the call that a thread is in, in words, and the time of its last progress.

    None if it has made no call. Idle threads keep their last one.
    """
    return _CALLS.get(thread)


def is_full(error: OSError) -> bool:
    """Return whether an error says that there is no room on a disk."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turn the system's error into ours, which names the action, the file and the reason.

    Until then `call_of` tells other threads what this one is doing.
    """
    thread = threading.get_ident()
    outer = _CALLS.get(thread)
    _CALLS[thread] = f"{action} {path}", time.monotonic()
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        kind = DiskFull if is_full(error) else DiskError
        raise kind(f"cannot {action} {path}: {error.strerror or error}") from error
    finally:
        text = f"the next call after: {action} {path}" if outer is None else outer[0]
        _CALLS[thread] = text, time.monotonic()
