"""Laws of memory/arena.py."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest
from torch import Tensor

from megatrain.memory import arena as arenas
from megatrain.memory.arena import map_arena

MIB = 1 << 20


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


def _drops(held: list[Tensor]) -> bool:
    """Map something where the parent's arena was, drop that arena, and look for the new one."""
    address = held[0].data_ptr()
    new = map_arena("new", MIB)
    hole = [map_arena("new", MIB) for _ in range(64)] + [new]
    taken = [one for one in hole if one.data_ptr() <= address < one.data_ptr() + one.nbytes]
    held.clear()
    gc.collect()
    return bool(taken) and not _is_mapped(address)


def test_a_child_that_drops_it_unmaps_nothing_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _in_a_fork(lambda: _drops([map_arena("weights", MIB)])) == 0
    held = [map_arena("weights", MIB)]
    assert _in_a_fork(lambda: _drops(held)) == 0
    monkeypatch.setattr(arenas, "_mappings", set())
    status = _in_a_fork(lambda: _drops(held))
    assert os.waitstatus_to_exitcode(status) != 0, "nothing is kept, and the new one is lost"


def test_a_kernel_without_an_advice_maps_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # EINVAL
    monkeypatch.delattr(mmap, "MADV_DONTDUMP")
    arena = map_arena("weights", MIB)
    assert int(arena.sum()) == 0
    with pytest.raises(OSError, match="Invalid argument"), mmap.mmap(-1, MIB) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
