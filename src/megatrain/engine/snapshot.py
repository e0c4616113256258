"""A frozen copy of the store after a step, block by block, while training continues.

    snapshot = engine.snapshot()
    for block in snapshot.order:        # the order in which training will want to change them
        snapshot.wait(block)            # the step's own update of it is done
        ...                             # read its weights, masters and moments
        snapshot.let_go(block)          # the next update of it may begin

Training and the reader meet only at a block that the next update reaches before the reader has let
it go; then the update waits. A reader that stops early closes the snapshot.

Laws (tests/engine/test_snapshot.py)
    1. Bytes read between `wait` and `let_go` are the state after the step, bit for bit, whatever
       the timing: never a later update, never without one that was still on its way.
    2. Updates wait for held blocks only, and for no longer than they are held.
    3. If the engine fails, the reader gets an error; no wait is endless.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from megatrain.errors import SnapshotLost

_POLL_S = 1.0


class Gate:
    """The gate between updates and snapshots: one update of a block at a time, one snapshot."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.num_updates = dict.fromkeys(blocks, 0)
        """Updates applied so far, per block: in backward a block may be left out alone."""
        self._changed = threading.Condition()
        self._held: dict[int, int] = {}
        self._failed = False

    def enter(self, block: int) -> int:
        """Wait until the block may be updated; return the number of the update, from 1."""
        with self._changed:
            while self._held.get(block) == self.num_updates[block] and not self._failed:
                self._changed.wait(_POLL_S)
            return self.num_updates[block] + 1

    def leave(self, block: int) -> None:
        """Count the update: all that it changed is where a reader of the store finds it."""
        with self._changed:
            self.num_updates[block] += 1
            self._changed.notify_all()

    def fail(self) -> None:
        """Let everybody go: weights are no longer those of a step."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def hold(self, targets: Mapping[int, int]) -> None:
        """Stop each block at its number of updates."""
        with self._changed:
            assert not self._held, "one snapshot at a time"
            self._held = dict(targets)

    def wait(self, block: int) -> None:
        """Wait until a held block has had its updates. Raises SnapshotLost."""
        with self._changed:
            target = self._held.get(block)
            while target is not None and self.num_updates[block] < target and not self._failed:
                self._changed.wait(_POLL_S)
            self._raise_if_failed()

    def release(self, block: int) -> None:
        """Let the block go. Raises SnapshotLost if it may have changed while it was held."""
        with self._changed:
            self._held.pop(block, None)
            self._changed.notify_all()
            self._raise_if_failed()

    def release_all(self) -> None:
        with self._changed:
            self._held.clear()
            self._changed.notify_all()

    def _raise_if_failed(self) -> None:
        if self._failed:
            raise SnapshotLost("training failed while its state was being saved")


class Snapshot:
    """The state after step `num_steps`. Close it when done, or when giving up."""

    def __init__(
        self, gate: Gate, order: Sequence[int], num_steps: int, num_updates: Mapping[int, int]
    ) -> None:
        self._gate = gate
        self.order = tuple(order)
        """All blocks, the first to change first."""
        self.num_steps = num_steps
        self.num_updates = dict(num_updates)
        gate.hold(self.num_updates)

    def wait(self, block: int) -> None:
        """Wait until the block is as it was after the step. Raises SnapshotLost."""
        self._gate.wait(block)

    def let_go(self, block: int) -> None:
        """Allow the next update of the block. Raises SnapshotLost: what was read is not a state."""
        self._gate.release(block)

    def close(self) -> None:
        """Allow all updates."""
        self._gate.release_all()
