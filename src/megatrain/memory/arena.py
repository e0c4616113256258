"""An arena: one anonymous mapping of exact size, not resident until touched.

Not torch's allocator: that one rounds pinned sizes up to powers of two and touches zeroed memory.
The kernel hands out zero pages on first write, so moments cost no memory before the first update.
Huge pages are advised: the optimizer walks hundreds of GiB, and small pages would be its limit.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from megatrain.errors import DoesNotFit
from megatrain.memory.ledger import gib


def map_arena(name: str, num_bytes: int) -> Tensor:
    """Return `num_bytes` of zeros as bytes, page aligned. They live as long as any view of them.

    Raises DoesNotFit if the system refuses the address space.
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
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
