"""Laws of memory/arena.py."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from pathlib import Path

import pytest
from torch import Tensor

from megatrain.memory import arena as arenas
from megatrain.memory.arena import map_arena

MIB = 1 << 20
MAP_FIXED_NOREPLACE = 0x100000


def _is_mapped(address: int) -> bool:
    """Return whether this process has the address, as the kernel lists it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, end = line.split()[0].partition("-")
        if int(first, 16) <= address < int(end, 16):
            return True
    return False


def _in_a_fork(work: object) -> int:
    """Return the exit status of a child that calls `work` and ends with its answer."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = int(work())  # type: ignore[operator]
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def test_a_forked_child_has_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = map_arena("weights", MIB).fill_(7)
    assert _is_mapped(arena.data_ptr())
    assert _in_a_fork(lambda: _is_mapped(arena.data_ptr())) == 0
    monkeypatch.setattr(arenas, "ADVICE", ())
    other = map_arena("weights", MIB).fill_(7)
    status = _in_a_fork(lambda: _is_mapped(other.data_ptr()))
    assert os.waitstatus_to_exitcode(status) == 1, "the question has another answer without advice"


def _map_at(address: int, num_bytes: int) -> None:
    """Map memory at this address, where nothing is."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    assert library.mmap(address, num_bytes, mmap.PROT_READ, flags, -1, 0) == address


def _drops(held: list[Tensor]) -> bool:
    """Map something where the parent's arena was, drop that arena, and look for the new one."""
    address = held[0].data_ptr()
    _map_at(address, MIB)
    held.clear()
    gc.collect()
    return not _is_mapped(address)


def test_a_child_that_drops_it_unmaps_nothing_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [map_arena("weights", MIB)]
    assert _in_a_fork(lambda: _drops(held)) == 0
    monkeypatch.setattr(arenas, "_mappings", set())
    status = _in_a_fork(lambda: _drops(held))
    assert os.waitstatus_to_exitcode(status) == 1, "nothing is kept, and the new one is lost"


def test_a_kernel_without_an_advice_maps_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # EINVAL
    monkeypatch.delattr(mmap, "MADV_DONTDUMP")
    arena = map_arena("weights", MIB)
    assert int(arena.sum()) == 0
    with pytest.raises(OSError, match="Invalid argument"), mmap.mmap(-1, MIB) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
