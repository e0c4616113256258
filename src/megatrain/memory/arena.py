"""An arena: one anonymous mapping of exact size, not resident until touched.

Not torch's allocator: that one rounds pinned sizes up to powers of two and touches zeroed memory.
The kernel hands out zero pages on first write, so moments cost no memory before the first update.
Huge pages are advised: the optimizer walks hundreds of GiB, and small pages would be its limit.

A forked child has no arenas. Memory that a device has registered is copied at a fork, hundreds of
GiB, or on older kernels moved away from under the device. Nor are arenas part of a core dump.

Laws (tests/memory/test_arena.py)
    1. A kernel without an advice changes nothing but speed.
    2. A forked child does not have the mapping, and frees nothing that it mapped at its place.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from megatrain.errors import DoesNotFit
from megatrain.memory.ledger import gib
from megatrain.memory.placement import Policy

ADVICE = ("MADV_HUGEPAGE", "MADV_DONTFORK", "MADV_DONTDUMP")
"""Those that the system has."""

_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_of_the_parent: list[mmap.mmap] = []


def map_arena(name: str, num_bytes: int, policy: Policy | None = None) -> Tensor:
    """Return `num_bytes` of zeros as bytes, page aligned. They live as long as any view of them.

    Its pages come from the NUMA nodes of `policy`, as far as the system can. Raises DoesNotFit if
    the system refuses the address space.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError, OverflowError) as error:
        raise DoesNotFit(
            f"host memory: the system refused {gib(num_bytes)} for arena {name!r}: {error}. "
            "See `ulimit -v` and vm.overcommit_memory, or use a smaller model."
        ) from error
    for advice in ADVICE:
        with suppress(OSError, AttributeError):
            mapping.madvise(getattr(mmap, advice))
    _mappings.add(mapping)
    arena = torch.frombuffer(mapping, dtype=torch.uint8)
    if policy is not None:
        policy.apply(arena.data_ptr(), num_bytes)
    return arena


def _forget_in_child() -> None:
    """Never unmap what the child does not have: its addresses may be somebody else's by then."""
    _of_the_parent.extend(_mappings)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def aligned_buffer(num_bytes: int) -> Tensor:
    """Return page-aligned bytes that return to the system when the tensor is dropped."""
    mapping = mmap.mmap(
        -1, max(num_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    return torch.frombuffer(mapping, dtype=torch.uint8)
