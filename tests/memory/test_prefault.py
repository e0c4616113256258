"""Laws of memory/prefault.py."""

from __future__ import annotations

import ctypes
import errno
import mmap
import threading
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatrain.errors import DoesNotFit
from megatrain.memory import prefault as module
from megatrain.memory.arena import map_arena
from megatrain.memory.prefault import LEAST_RATE, LinuxPages, prefault

PIECE = 1 << 20


def _resident_pages(arena: Tensor) -> int:
    """Return the resident pages, as the kernel tells."""
    pages = -(-arena.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    address, length = ctypes.c_void_p(arena.data_ptr()), ctypes.c_size_t(arena.nbytes)
    assert ctypes.CDLL(None).mincore(address, length, found) == 0
    return sum(entry & 1 for entry in found)


class Unhurried(LinuxPages):
    """Pages of this system, however busy it is."""

    now = staticmethod(lambda: 0.0)


class FakePages:
    """Pages whose making takes as long as told, by a clock of their own for each thread."""

    def __init__(self, rates: list[float], huge_bytes: int = 0) -> None:
        self.rates, self.small, self.made = rates, 0, 0
        self.huge_bytes = huge_bytes
        self.pieces: list[tuple[int, int]] = []
        """First and last address of each piece."""
        self._lock, self._times = threading.Lock(), threading.local()

    def populate(self, piece: Tensor) -> None:
        with self._lock:
            rate = self.rates[min(self.made, len(self.rates) - 1)]
            self.made += 1
            self.pieces.append((piece.data_ptr(), piece.data_ptr() + piece.nbytes))
        self._times.at = self.now() + piece.nbytes / rate

    def keep_small(self, piece: Tensor) -> None:
        with self._lock:
            self.small += 1

    def now(self) -> float:
        return float(getattr(self._times, "at", 0.0))


@pytest.mark.parametrize("populates", [True, False], ids=["populate", "touch"])
def test_every_page_is_resident_and_no_byte_changes(
    populates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not populates:
        monkeypatch.setattr(module, "_POPULATE_WRITE", 9999)
    arena = map_arena("weights", 9 * PIECE + mmap.PAGESIZE)
    arena[5 * PIECE : 5 * PIECE + 100] = 7
    before = arena[5 * PIECE : 6 * PIECE].clone()
    assert _resident_pages(arena) < arena.nbytes // mmap.PAGESIZE
    prefault("weights", arena, pages=Unhurried(), piece_bytes=PIECE)
    assert _resident_pages(arena) == arena.nbytes // mmap.PAGESIZE
    assert torch.equal(arena[5 * PIECE : 6 * PIECE], before)
    assert int(arena.sum()) == 700


def test_a_collapse_leaves_small_pages_to_the_rest() -> None:
    arena = map_arena("weights", 40 * PIECE)
    pages = FakePages([1e9] * 8 + [LEAST_RATE / 10, 1e9])
    with pytest.warns(UserWarning, match=r"pages of weights at 10 MB/s in each thread"):
        prefault("weights", arena, pages=pages, piece_bytes=PIECE)
    assert pages.made == 40
    assert 40 - 9 - module.TOUCHING_THREADS <= pages.small <= 40 - 9
    steady = FakePages([2 * LEAST_RATE])
    prefault("weights", arena, pages=steady, piece_bytes=PIECE)
    assert steady.made == 40
    assert steady.small == 0


@pytest.mark.parametrize("huge_bytes", [0, PIECE // 4, 8 * PIECE])
def test_no_huge_page_is_touched_by_two_threads(huge_bytes: int) -> None:
    """Pages of 512 MiB are larger than a usual piece, which eight threads would share."""
    arena = map_arena("weights", 40 * PIECE)[3 * mmap.PAGESIZE :]
    pages = FakePages([2 * LEAST_RATE], huge_bytes)
    prefault("weights", arena, pages=pages, piece_bytes=PIECE)
    pages.pieces.sort()
    begin, end = arena.data_ptr(), arena.data_ptr() + arena.nbytes
    assert (pages.pieces[0][0], pages.pieces[-1][1]) == (begin, end)
    assert all(one[1] == following[0] for one, following in pairwise(pages.pieces))
    if huge_bytes:
        touched = [range(a // huge_bytes, (b - 1) // huge_bytes + 1) for a, b in pages.pieces]
        assert all(one[-1] < following[0] for one, following in pairwise(touched))
    assert max(b - a for a, b in pages.pieces) <= max(PIECE, huge_bytes)


def test_pages_that_the_system_does_not_have_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_advise", lambda piece, advice: errno.ENOMEM)
    with pytest.raises(DoesNotFit, match=r"no pages for the tape, 1.0 MiB: .*memory"):
        prefault("the tape", map_arena("tape", PIECE))


def test_an_empty_arena_has_no_pages() -> None:
    prefault("weights", map_arena("weights", 0))
