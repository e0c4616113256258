"""Touch the pages of an arena before a device registers it, in our own threads.

A driver that registers memory faults its pages in one by one, under its own lock. Ours come in
parallel, on the nodes of the arena's policy, with progress. On a host whose memory is fragmented
the kernel may spend seconds to make each huge page: then the rest of the arena gets small ones.

Laws (tests/memory/test_prefault.py)
    1. Afterwards every page is resident, and no byte has changed.
    2. Where huge pages collapse the rate, the pieces that follow have small pages.
    3. A kernel without MADV_POPULATE_WRITE touches pages in the same order.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise, repeat
from pathlib import Path
from typing import Protocol

from torch import Tensor

from megatrain.errors import DoesNotFit
from megatrain.memory.host import num_cores
from megatrain.memory.ledger import gib
from megatrain.progress import Advance, byte_progress

TOUCHED_BYTES = 128 << 20
"""Size of a piece, or the huge page of the kernel if that is larger."""
TOUCHING_THREADS = 8
SHOWN = 64
"""Pieces of an arena whose progress is shown: 8 GiB."""
LEAST_RATE = 100e6
"""Bytes per second of one thread. Zeroing small pages runs at ten times as much; making huge ones
on a fragmented host has been reported at a fifth of it."""
_HUGE_PAGE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
"""2 MiB where pages are 4 KiB, 512 MiB where they are 64 KiB, as on many GH200."""
_POPULATE_WRITE = 23
"""Number of the advice in linux/mman.h, since 5.14. Python has no name for it."""


class Pages(Protocol):
    """The kernel's calls for the pages of a mapping."""

    def populate(self, piece: Tensor) -> None:
        """Make the pages resident. Raises OSError."""

    def keep_small(self, piece: Tensor) -> None:
        """Ask for no huge pages in it."""

    def now(self) -> float:
        """Return seconds since some moment."""

    @property
    def huge_bytes(self) -> int:
        """Size of a huge page; 0 if there are none."""


class LinuxPages:
    """The kernel of this system."""

    now = staticmethod(time.monotonic)

    @property
    def huge_bytes(self) -> int:
        with suppress(OSError, ValueError):
            return int(_HUGE_PAGE.read_text())
        return 0

    def populate(self, piece: Tensor) -> None:
        code = _advise(piece, _POPULATE_WRITE)
        if code == errno.EINVAL:
            touch(piece)
        elif code != 0:
            raise OSError(code, os.strerror(code))

    def keep_small(self, piece: Tensor) -> None:
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            _advise(piece, mmap.MADV_NOHUGEPAGE)


def prefault(
    name: str, arena: Tensor, *, pages: Pages | None = None, piece_bytes: int = TOUCHED_BYTES
) -> None:
    """Make every page of the arena resident; nobody may write to it meanwhile.

    Shows its progress if that takes seconds. Raises DoesNotFit if the system has no page left.
    """
    system = pages or LinuxPages()
    # Pieces begin where huge pages do: threads that share one would wait for each other's zeros.
    huge_bytes = system.huge_bytes
    piece_bytes = max(piece_bytes, huge_bytes)
    first = -arena.data_ptr() % huge_bytes if huge_bytes else 0
    cuts = sorted({0, *range(first, arena.nbytes, piece_bytes), arena.nbytes})
    pieces = [arena[start:stop] for start, stop in pairwise(cuts)]
    slow: list[float] = []

    def work(piece: Tensor, advance: Advance) -> None:
        if slow:
            system.keep_small(piece)
        begin = system.now()
        system.populate(piece)
        rate = piece.nbytes / max(system.now() - begin, 1e-9)
        if rate < LEAST_RATE and piece.nbytes == piece_bytes:
            slow.append(rate)
        advance(piece.nbytes)

    try:
        with (
            byte_progress(f"pages of {name}", arena.nbytes, shown=len(pieces) >= SHOWN) as advance,
            ThreadPoolExecutor(min(TOUCHING_THREADS, num_cores())) as threads,
        ):
            list(threads.map(work, pieces, repeat(advance)))
    except OSError as error:
        raise DoesNotFit(
            f"host memory: the system gave no pages for {name}, {gib(arena.nbytes)}: {error}"
        ) from error
    if slow:
        warnings.warn(
            f"host memory: the kernel made pages of {name} at {slow[0] / 1e6:,.0f} MB/s in each "
            "thread, as it does when memory is fragmented; the rest has small pages, which cost "
            "the optimizer some speed. A restart of the machine helps.",
            stacklevel=2,
        )


def touch(piece: Tensor) -> None:
    """Write a byte of each page as it is."""
    piece[:: mmap.PAGESIZE].bitwise_or_(0)
    piece[-1:].bitwise_or_(0)  # the last page, where the piece begins inside one


def _advise(piece: Tensor, advice: int) -> int:
    """Give advice on the pages that have bytes of a piece; return the error's number, or 0."""
    first = piece.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = piece.data_ptr() + piece.nbytes
    library = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(advice))
    return ctypes.get_errno() if library.madvise(*arguments) else 0
