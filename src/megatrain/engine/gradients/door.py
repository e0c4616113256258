"""The door through which a block's gradient adds up, leaves the device and is read.

    HEAD, BACKWARD   begin(op), add(grads)   compute lane: sums in fp32
                     add_page(...)           the same for a page of experts
    EXCHANGE(b)      exchange(op)            comm lane: with other ranks, each gets the part it owns
    DRAIN(b)         drain(op)               out lane: queue the copies to the host, in its dtype
    NORM(b)          finish(op)              host lane: the drained bytes are the full gradient now
    NORM, UPDATE     flat(op)                host lane: where it is, one flat view per segment
    SEND(b) ...      directions              those of matrices, there and back (directions.py)

How gradients add up is chosen once: at home (home_sums.py) where compute shares the host's memory,
in slots (slot_sums.py) on a device that copies.

On the host a gradient is in the store (kind `grad`) until the norm of the step is known. Where
compute shares the host's memory it may add up there: the update of the step before has read that
place, for FORWARD(b) reads the weights it wrote. Where updates run in backward it is in a ring of a
few buffers, and only those of embedding and head add up there.

Who waits: nothing here does. `drain` queues casts and copies, which are done when the stream of the
out lane is there, and the host ops run once it is complete. The schedule gives a slot to the next
block after the drain, and a buffer of the ring after the update. Views of `flat` are valid until
the next drain into them.

Where ranks share the store, all that is on the host is what this rank owns.

Laws (tests/engine/gradients/test_door.py)
    1. The views of `flat` have dtype and size of their segments, and do not overlap.
    2. A drained gradient is the fp32 sum, rounded once to the host's dtype.
    3. A model that is only read has no memory for gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from megatrain.devices.device import Device
from megatrain.engine import optional
from megatrain.engine.embedding_rows import EmbeddingRows
from megatrain.engine.gradients.home_sums import HomeSums
from megatrain.engine.gradients.outbox import OUTBOX_BYTES, DirectCopies, Outbox
from megatrain.engine.gradients.slot_sums import SlotSums
from megatrain.engine.gradients.slots import GradSlots
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import PAGE, Layout, Place, Segment
from megatrain.memory.store import Store
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.step.ops import Op, Resource, Role, SlotId
from megatrain.step.shape import StepShape

if TYPE_CHECKING:
    from megatrain.engine.exchange import Exchange
    from megatrain.engine.gradients.directions import Directions


class Gradients:
    """The gradients of all trained blocks, from compute to the host lane."""

    def __init__(
        self,
        store: Store,
        device: Device,
        shape: StepShape,
        places: Mapping[Resource, Resource],
        rows: EmbeddingRows | None,
        *,
        updates: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        """`places` are those of the things of a step.

        `updates`: an optimizer will read gradients. Without one they stay in the store, if there.
        """
        self._layout = store.layout
        self._device = device
        trains = updates or TensorKind.GRAD in store.kinds
        trained = shape.trained_blocks if trains else []
        self._slot_of = {block: places["grad_sum", block][1] for block in trained}
        trains_rows = rows is not None and store.layout.places[rows.name].param.trained
        self._rows = rows if trains_rows else None
        slots = GradSlots(
            store.layout,
            _users(self._slot_of),
            lambda size: device.allocate(size, "gradient slots"),
            gathered=None if self._rows is None else self._rows.name,
            least={
                block: optional.directions.direction_bytes(store.layout, block)
                for block in shape.matrix_blocks
            },
        )
        self._slot_buffers, self._ranks = slots.buffers, ranks
        drained = {block: _ring_slot(places["drained_grad", block]) for block in trained}
        ring_slot_of = {block: slot for block, slot in drained.items() if slot is not None}
        self._on_host = _OnHost(store, device, ring_slot_of)
        if device.own_memory and trains and not ring_slot_of:
            device.pin("gradients", store.arena(TensorKind.GRAD))
        self._sums: HomeSums | SlotSums
        if device.copying:
            self._sums = _slot_sums(slots, device, shape if trains else None, self._rows, ranks)
        else:
            # Layers take turns in the ring. Embedding and head have a place there that is theirs.
            at_home = [b for b in trained if b not in shape.layers or b not in ring_slot_of]
            homes = {
                place.param.name: _param_of(device.in_place(flat), place)
                for block in at_home
                for segment, flat in self._on_host.flat(block, ring_slot_of.get(block))
                for place in store.layout.segment_places(segment)
            }
            self._sums = HomeSums(slots, homes)

    @cached_property
    def directions(self) -> Directions:
        """Directions of matrices, in the memory of gradient slots."""
        return optional.directions.Directions(
            self._layout, self._device, self._slot_buffers, self._ranks
        )

    def reserve(self) -> None:
        """Make room for the rows of a step. Nothing may be under way."""
        if isinstance(self._sums, SlotSums):
            self._sums.reserve()

    def release(self) -> None:
        """Give up the memory of gradient slots until the next step. Nothing may be under way."""
        if isinstance(self._sums, SlotSums):
            self._sums.release()

    def begin(self, op: Op) -> None:
        """Forget what the gradient slots hold that `op` writes, unless it adds to them.

        The head of a tied model also begins the embedding's: its parts come first.
        """
        if op.adds:
            return
        for family, *where in op.writes:
            if family == "grad_slot":
                self._sums.begin(where[0])

    def add(self, grads: Mapping[str, Tensor | None], first_row: int | None = None) -> None:
        """Add gradients by param name; None adds nothing. Parts may be kept until the drain.

        With `first_row` they have some rows only, from that one on.
        """
        by_block: dict[int, dict[str, Tensor]] = {}
        for name, grad in grads.items():
            if grad is not None:
                block = self._layout.places[name].segment.block
                by_block.setdefault(block, {})[name] = grad
        for block, parts in by_block.items():
            self._sums.add(self._slot_of[block], block, parts, first_row)

    def add_rows(self, name: str, ids: Tensor, grad: Tensor) -> None:
        """Add a gradient that is zero but for the rows `ids` (rows,), which are distinct.

        Only where compute shares the host's memory.
        """
        assert isinstance(self._sums, HomeSums)
        block = self._layout.places[name].segment.block
        self._sums.add_rows(self._slot_of[block], block, name, ids, grad)

    def add_page(self, name: str, experts: range, gradient: Tensor | None) -> None:
        """Add the gradient of some experts of a param, (experts, ...), in the order of experts.

        None: they have no rows.
        """
        if gradient is not None:
            self.add({name: gradient}, experts.start)
        else:
            assert isinstance(self._sums, SlotSums)
            block = self._layout.places[name].segment.block
            self._sums.add_zeros(self._slot_of[block], block, name, experts)

    def exchange(self, op: Op) -> int:
        """Queue what makes this rank's part of the gradient the sum of all ranks.

        Returns the bytes that go to others.
        """
        assert isinstance(self._sums, SlotSums)
        return self._sums.exchange(*_place(op))

    def drain(self, op: Op) -> int:
        """Queue the copies of the gradient to the host; return their bytes."""
        targets = self.flat(op)
        if not self._device.copying:
            targets = [(segment, self._device.in_place(flat)) for segment, flat in targets]
        return self._sums.drain(*_place(op), targets)

    def finish(self, op: Op) -> None:
        """Make the drained bytes of the op's block its full gradient: rows become a table."""
        if op.role is Role.EMBEDDING and self._rows is not None:
            self._rows.spread(self._param(op, self._rows.name))

    def flat(self, op: Op) -> list[tuple[Segment, Tensor]]:
        """Return where the gradient of the op's block is on the host, segment by segment."""
        assert op.block is not None
        return self._on_host.flat(op.block, _ring_slot(op.place("drained_grad")))

    def _param(self, op: Op, name: str) -> Tensor:
        """Return where the gradient of one param of the op's block is on the host, flat."""
        place = self._layout.places[name]
        (gradient,) = (flat for segment, flat in self.flat(op) if segment is place.segment)
        return _param_of(gradient, place).flatten()


class _OnHost:
    """The gradients that wait for their update: in the store, or in a ring of a few buffers."""

    def __init__(self, store: Store, device: Device, ring_slot_of: Mapping[int, SlotId]) -> None:
        self._store = store
        self._ring = {
            slot: device.map_host(max(_owned_bytes(store.layout, b) for b in blocks), "gradients")
            for slot, blocks in _users(ring_slot_of).items()
        }

    def flat(self, block: int, ring_slot: SlotId | None) -> list[tuple[Segment, Tensor]]:
        segments = self._store.layout.trained_segments(block)
        if ring_slot is None:
            return [(s, self._store.segment(s, TensorKind.GRAD)) for s in segments]
        buffer, start, found = self._ring[ring_slot], 0, []
        for segment in segments:
            stop = start + len(segment.owned) * segment.dtype.itemsize
            found.append((segment, buffer[start:stop].view(segment.dtype)))
            start = stop
        return found


def _slot_sums(
    slots: GradSlots,
    device: Device,
    trained: StepShape | None,
    rows: EmbeddingRows | None,
    ranks: Ranks,
) -> SlotSums:
    """Return sums in slots, with the buffers that they pass on their way; `trained` needs some."""
    exchange: Exchange | None = None
    copies: Outbox | DirectCopies = DirectCopies()
    layout = slots.layout
    if trained is not None and trained.divided:
        largest = max(_all_bytes(layout, block) for block in trained.trained_blocks)
        exchange = optional.exchange.Exchange(device, ranks, largest)
    if trained is not None and device.own_memory:
        largest = max(_owned_bytes(layout, block) for block in trained.trained_blocks)
        # A rank may own nothing of a model that is tiny.
        copies = Outbox(device, max(PAGE, min(largest, OUTBOX_BYTES)))
    return SlotSums(slots, copies, exchange=exchange, rows=rows)


def _param_of(flat: Tensor, place: Place) -> Tensor:
    """Return the view of one param in the flat gradient of its segment."""
    param = place.param
    return flat[place.start : place.start + param.num_elements].view(param.shape)


def _place(op: Op) -> tuple[SlotId, int]:
    """Return the gradient slot of an op, and its block."""
    assert op.block is not None
    return op.place("grad_sum")[1], op.block


def _ring_slot(drained: Resource) -> SlotId | None:
    """Return the buffer of the ring that a drained gradient is in; None: it is in the store."""
    return drained[1] if drained[0] == "host_grad" else None


def _users(slot_of: Mapping[int, SlotId]) -> dict[SlotId, list[int]]:
    """Return the blocks that visit each slot."""
    users: dict[SlotId, list[int]] = {}
    for block, slot in slot_of.items():
        users.setdefault(slot, []).append(block)
    return users


def _owned_bytes(layout: Layout, block: int) -> int:
    """Return the bytes of this rank's part of a block's gradient, on the host."""
    return sum(len(s.owned) * s.dtype.itemsize for s in layout.trained_segments(block))


def _all_bytes(layout: Layout, block: int) -> int:
    """Return the bytes of a block's gradient, of all ranks."""
    return sum(s.num_elements * s.dtype.itemsize for s in layout.trained_segments(block))
