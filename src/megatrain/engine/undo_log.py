"""The undo log: some blocks as they were before an update that may be taken back. Of the host lane.

    SPECULATE(b)   keep(block, ...)   weights, masters and states, before each part is changed
    UPDATE(b)      restore(block)     they are back, to the byte
                   forget(block)      the update stays

States are kept as they are stored, in whatever dtype. Each block has its own place, from its
SPECULATE in backward to its UPDATE behind the norm; the bytes are resident once they were written.

Laws (tests/engine/test_undo_log.py)
    1. `restore` gives back all that was kept, whatever was written since: also of an update that
       failed half way, for no byte is changed before it is kept.
    2. The log has the bytes of the masters and states of its blocks, and none for others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from torch import Tensor

from megatrain.memory.arena import map_arena
from megatrain.memory.host import free_bytes
from megatrain.memory.kinds import Kind
from megatrain.memory.ledger import Ledger, Line
from megatrain.memory.store import Store

UNDO_LOG = "undo log"
"""The purpose of its bytes in a ledger."""


class UndoLog:
    """Room for the bytes of `blocks`, and what is kept there now."""

    def __init__(self, store: Store, states: Iterable[Kind], blocks: Sequence[int]) -> None:
        """Map the memory. Raises DoesNotFit if its bytes are not free; touches none of them."""
        kinds = (Kind.HI, Kind.LO, *states)
        sizes = {block: _changed_bytes(store, kinds, block) for block in blocks}
        total = sum(sizes.values())
        Ledger([Line(place="host", purpose=UNDO_LOG, num_bytes=total)]).require(
            "host", free_bytes()
        )
        arena, ends = map_arena(UNDO_LOG, total), accumulate(sizes.values())
        self._places = {
            block: arena[end - size : end]
            for (block, size), end in zip(sizes.items(), ends, strict=True)
        }
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(place.nbytes for place in self._places.values())

    @property
    def blocks(self) -> list[int]:
        """The blocks that were changed and may have to be restored."""
        return list(self._kept)

    def __contains__(self, block: int) -> bool:
        return block in self._kept

    def keep(self, block: int, parts: Iterable[Tensor | None]) -> None:
        """Copy flat parts of a block's tensors, before they are changed; None is not there."""
        kept = self._kept.setdefault(block, [])
        start = sum(copy.nbytes for _, copy in kept)
        for part in parts:
            if part is not None:
                copy = self._places[block][start : start + part.nbytes].view(part.dtype)
                copy.copy_(part)
                kept.append((part, copy))
                start += part.nbytes

    def restore(self, block: int) -> None:
        """Put back all that was kept of a block."""
        for part, copy in self._kept.pop(block, ()):
            part.copy_(copy)

    def forget(self, block: int) -> None:
        """Let what was kept of a block go, if anything was: its update stays."""
        self._kept.pop(block, None)


def _changed_bytes(store: Store, kinds: Sequence[Kind], block: int) -> int:
    """Return the bytes of a block that an update changes, of what is here."""
    return sum(
        store.segment(segment, kind).nbytes
        for segment in store.layout.trained_segments(block)
        for kind in kinds
        if kind in segment.starts
    )
