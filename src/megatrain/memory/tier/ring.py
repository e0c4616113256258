"""Host buffers between scratch file and updates: what a block has on disk, while it is here.

    READ(b)     read(op)     the block's region into the op's buffer
    UPDATE(b)   region(op)   that buffer, to work in
    WRITE(b)    write(op)    the region back to the disk

Layers take turns, embedding and head share a buffer (features/disk_offload). Only the disk lane
moves bytes here. The schedule decides who may use a buffer when; nothing here waits for anything
but the disk.

Law (tests/memory/tier/test_ring.py): a buffer has room for each of its blocks, and the ring takes
what the ledger says.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.memory.arena import map_arena
from megatrain.memory.kinds import TensorKind, kinds_on_disk
from megatrain.memory.store import Store
from megatrain.memory.tier.scratch_file import Tier
from megatrain.step.ops import Op, SlotId


def check_tier(store: Store, tier: str) -> None:
    """Raise ConfigError unless the store has on disk what the settings of a step say."""
    planned = kinds_on_disk(store.kinds, tier)
    if store.on_disk != planned:
        found, wanted = (
            ", ".join(map(str, kinds)) or "nothing" for kinds in (store.on_disk, planned)
        )
        raise ConfigError(
            f"the store has {found} on disk, but StepSettings.tier is {tier!r}: it needs {wanted} "
            "there"
        )


class TierRing:
    """The buffers of one engine. A store without a tier needs none."""

    def __init__(self, store: Store, slot_of: Mapping[int, SlotId]) -> None:
        """`slot_of` has the buffer of each block that is updated."""
        self._tier_of_store = store.tier
        sizes: dict[SlotId, int] = {}
        for block, slot in slot_of.items():
            sizes[slot] = max(sizes.get(slot, 0), self._tier.regions.region_bytes(block))
        self._buffers = {slot: map_arena("tier ring", size) for slot, size in sizes.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def region(self, op: Op) -> Tensor | None:
        """Return the buffer that the op works in; None if its block has nothing on disk."""
        family, slot = op.place("optim_state")
        return self._buffers[slot] if family == "tier_slot" else None

    def read(self, op: Op) -> int:
        """Bring what the block has on disk; return its bytes. Raises ScratchFileCorrupted or
        DiskError."""
        return self._tier.read(_block(op), self._parts(op))

    def write(self, op: Op) -> int:
        """Put masters and states back; return their bytes. Raises DiskError."""
        return self._tier.write(_block(op), self._parts(op))

    def _parts(self, op: Op) -> dict[TensorKind, Tensor]:
        region = self.region(op)
        assert region is not None
        return self._tier.regions.parts(_block(op), region)

    @property
    def _tier(self) -> Tier:
        assert self._tier_of_store is not None, "the store has no tier"
        return self._tier_of_store


def _block(op: Op) -> int:
    assert op.block is not None
    return op.block
