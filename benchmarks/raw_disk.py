"""The speed of a disk by itself: plain sequential loops, to compare ours with."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megatrain.memory.arena import aligned_buffer
from megatrain.memory.direct import as_memory

RAW_BYTES = 16 << 20


def raw_read(paths: list[Path]) -> float:
    """Return the bytes/s of one sequential O_DIRECT read of `paths`."""
    memory = as_memory(aligned_buffer(RAW_BYTES))
    total, begin = 0, time.perf_counter()
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        while count := os.readv(fd, [memory]):
            total += count
        os.close(fd)
    return total / (time.perf_counter() - begin)


def raw_write(path: Path, num_bytes: int) -> float:
    """Return the bytes/s of one sequential O_DIRECT write and fsync."""
    buffer = aligned_buffer(RAW_BYTES)
    buffer.random_(0, 256)
    memory = as_memory(buffer)
    begin = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, num_bytes)
    written = 0
    while written < num_bytes:
        written += os.write(fd, memory)
    os.fsync(fd)
    os.close(fd)
    seconds = time.perf_counter() - begin
    path.unlink()
    return written / seconds
