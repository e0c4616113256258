"""Gradients: the door through which a block's gradient adds up, leaves the device and is read.

    HEAD, PIECE,     begin(op), add(grads)   compute lane: sums in fp32, in gradient slots
    BACKWARD
    EXCHANGE(b)      exchange(op)            comm lane: with other ranks, each gets the part it owns
    DRAIN(b)         drain(op)               out lane: queue the copies to the host, in its dtype
    NORM(b)          finish(op)              host lane: the drained bytes are the full gradient now
    NORM, UPDATE     flat(op)                host lane: where it is, one flat view per segment
    SPILL(b)         pages(op)               disk lane: its bytes, if it waits on disk

On the host a gradient is in the store (kind `grad`) until the norm of the step is known, and where
compute shares the host's memory it may add up there (grad_slots.py): the update of the step before
has read that place, for FORWARD(b) reads the weights it wrote. Where updates run in backward, or
gradients wait on disk, it is in a ring of a few buffers.

Who waits: nothing here does. `drain` queues casts and copies, which are done when the stream of the
out lane is there, and the host ops run once it is complete. The schedule gives a slot to the next
block after the drain, and a buffer of the ring after the update. Views of `flat` are valid until
the next drain into them.

Where ranks share the store, all that is on the host is what this rank owns.

Laws (tests/engine/test_gradients.py; of the sums: grad_slots.py)
    1. The views of `flat` have dtype and size of their segments, and do not overlap.
    2. A drained gradient is the fp32 sum, rounded once to the host's dtype, whatever the outbox.
    3. A model that is only read has no memory for gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from megatrain.devices.device import Device
from megatrain.engine.embedding_rows import EmbeddingRows
from megatrain.engine.exchange import Exchange
from megatrain.engine.grad_slots import GradSlots, Tenant
from megatrain.lanes.progress import Event
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import PAGE, Layout, Segment
from megatrain.memory.store import Store
from megatrain.ranks.ownership import overlap
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.step.ops import Op, Role, SlotId
from megatrain.step.places import block_places
from megatrain.step.settings import vocabulary_pieces
from megatrain.step.shape import StepShape

OUTBOX_BYTES = 64 << 20
_CAST = 256
"""Halves of the outbox begin where every kernel can write fast."""
User = TypeVar("User", int, Tenant)


class Gradients:
    """The gradients of all trained blocks, from compute to the host lane."""

    def __init__(
        self,
        store: Store,
        device: Device,
        shape: StepShape,
        rows: EmbeddingRows | None,
        *,
        updates: bool,
        projection: Sequence[str] = (),
        ranks: Ranks = ALONE,
    ) -> None:
        """`updates`: an optimizer will read them. Without one they stay in the store, if there.

        `projection` are the params that have a row per token: they leave by pieces, if any do.
        """
        self._store = store
        trains = updates or Kind.GRAD in store.kinds
        places = [place for place in enumerate(block_places(shape)) if trains]
        self._slot_of: dict[Tenant, SlotId] = {
            (block, piece): slot for block, p in places for piece, slot in enumerate(p.grad_slots)
        }
        self._piece = 0
        """Of the op whose gradients are being added."""
        ring_slot_of = {b: p.host_grad for b, p in places if p.host_grad is not None}
        trains_rows = rows is not None and store.layout.places[rows.name].param.trained
        self._rows = rows if trains_rows else None
        self.by_rows = device.copying or not ring_slot_of
        """Whether the gradient of a large table comes some rows at a time: its sum has a place."""
        self._slots = GradSlots(
            store.layout,
            _users(self._slot_of),
            lambda size: device.allocate(size, "gradient slots"),
            keeps_first=not device.copying,
            cuts=_cuts(store.layout, projection, shape.head_pieces),
            gathered=None if self._rows is None else self._rows.name,
            homes={} if device.copying else _homes(store, [b for b, _ in places], ring_slot_of),
        )
        self._ring = {
            slot: device.map_host(max(map(self._num_pages, blocks)) * PAGE, "gradients")
            for slot, blocks in _users(ring_slot_of).items()
        }
        self._exchange: Exchange | None = None
        if shape.divided and trains:
            largest = max(self._num_bytes(block, of_all=True) for block in shape.trained_blocks)
            self._exchange = Exchange(device, ranks, largest)
        self._outbox: _Outbox | None = None
        if device.own_memory and trains:
            largest = max(map(self._num_bytes, shape.trained_blocks))
            # A rank may own nothing of a model that is tiny.
            self._outbox = _Outbox(device, max(PAGE, min(largest, OUTBOX_BYTES)))
            if not self._ring:
                device.pin("gradients", store.arena(Kind.GRAD))

    def reserve(self) -> None:
        """Make room for the rows that a step needs. Nothing may be under way."""
        if self._rows is not None:
            self._slots.reserve(self._rows.num_rows)

    def begin(self, op: Op) -> None:
        """Forget what the gradient slots hold that `op` writes, unless it adds to them.

        What is added from now on is of its piece. The head of a tied model also begins the
        embedding's: its parts come first.
        """
        self._piece = op.piece or 0
        if op.adds:
            return
        for family, *where in op.writes:
            if family == "grad_slot":
                self._slots.begin(where[0])

    def add(self, grads: Mapping[str, Tensor | None], first_row: int | None = None) -> None:
        """Add gradients by param name; None adds nothing. Parts may be kept until the drain.

        With `first_row` they have some rows only (grad_slots.py).
        """
        by_block: dict[int, dict[str, Tensor]] = {}
        for name, grad in grads.items():
            if grad is not None:
                block = self._store.layout.places[name].segment.block
                by_block.setdefault(block, {})[name] = grad
        for block, parts in by_block.items():
            tenant = (block, self._piece)
            self._slots.add(self._slot_of[tenant], tenant, parts, first_row)

    def add_rows(self, name: str, ids: Tensor, grad: Tensor) -> None:
        """Add a gradient that is zero but for the rows `ids`, which are distinct."""
        tenant = (self._store.layout.places[name].segment.block, self._piece)
        self._slots.add_rows(self._slot_of[tenant], tenant, name, ids, grad)

    def exchange(self, op: Op) -> int:
        """Queue what makes this rank's part of the gradient the sum of all ranks.

        Returns the bytes that go to others.
        """
        assert op.block is not None
        assert op.grad_slot is not None
        assert self._exchange is not None
        segments, num_bytes = self._store.layout.trained_segments(op.block), 0
        for number, elements, total in self._slots.runs(op.grad_slot, (op.block, op.piece or 0)):
            segment = segments[number]
            num_bytes += self._exchange.add_up(total, elements, segment.parts, segment.dtype)
        return num_bytes

    def drain(self, op: Op) -> int:
        """Queue the copies of the gradient, or of its piece, to the host; return their bytes."""
        assert op.block is not None
        assert op.grad_slot is not None
        tenant, num_bytes = (op.block, op.piece or 0), 0
        targets = self.flat(op)
        if self._outbox is None and self._exchange is None:
            return self._slots.move_out(op.grad_slot, tenant, [target for _, target in targets])
        if self._outbox is not None:
            self._outbox.begin()
        for name, number, span, total in self._slots.parts(op.grad_slot, tenant):
            segment, whole = targets[number]
            if self._rows is not None and name == self._rows.name:
                target = self._rows.drained()
            else:
                owned = segment.owned
                here = overlap(range(span.start, span.stop), owned)
                target = whole[here.start - owned.start : here.stop - owned.start]
                if total is not None:
                    total = total.view(-1)[here.start - span.start : here.stop - span.start]
            num_bytes += target.nbytes
            self._send(target, None if total is None else total.view(-1))
        return num_bytes

    def _send(self, target: Tensor, total: Tensor | None) -> None:
        """Queue the copy of a flat sum to the host; None is zero."""
        if self._outbox is not None:
            self._outbox.send(target, total)
        elif total is None:
            target.zero_()
        else:
            target.copy_(total)

    def finish(self, op: Op) -> None:
        """Make the drained bytes of the op's block its full gradient: rows become a table."""
        if op.role is Role.EMBEDDING and self._rows is not None:
            self._rows.spread(self._param(op, self._rows.name))

    def flat(self, op: Op, region: Tensor | None = None) -> list[tuple[Segment, Tensor]]:
        """Return where the gradient of the op's block is on the host, segment by segment.

        `region` has what the block has on disk: its gradient too, if that waited there.
        """
        assert op.block is not None
        segments = self._store.layout.trained_segments(op.block)
        if op.host_grad is None:
            return [(s, self._store.segment(s, Kind.GRAD, region)) for s in segments]
        return list(_cut(self._ring[op.host_grad], segments))

    def pages(self, op: Op) -> Tensor:
        """Return the drained gradient of the op's block as whole pages, laid out as in a store."""
        assert op.block is not None
        assert op.host_grad is not None
        return self._ring[op.host_grad][: self._num_pages(op.block) * PAGE]

    def _param(self, op: Op, name: str) -> Tensor:
        """Return where the gradient of one param of the op's block is on the host, flat."""
        place = self._store.layout.places[name]
        (gradient,) = (flat for segment, flat in self.flat(op) if segment is place.segment)
        return gradient[place.start : place.start + place.param.num_elements]

    def _num_pages(self, block: int) -> int:
        return -(-self._num_bytes(block) // PAGE)

    def _num_bytes(self, block: int, *, of_all: bool = False) -> int:
        """Return the bytes of what is here of a block's gradient, or of all ranks' parts."""
        segments = self._store.layout.trained_segments(block)
        counts = [s.num_elements if of_all else len(s.owned) for s in segments]
        return sum(c * s.dtype.itemsize for c, s in zip(counts, segments, strict=True))


class _Outbox:
    """Where a gradient takes the dtype of the host, on its way there. Of the out lane alone.

    A copy that changes the dtype needs a buffer. This one is filled and copied out piece by piece,
    so that it does not grow with the largest block. It has two halves: while the lane's stream
    copies from one, a stream of its own casts into the other, and the link does not idle. Only
    these two streams use it: a half is cast into when its last copy is done.
    """

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        buffer, half = device.allocate(num_bytes, "outbox"), num_bytes // 2 // _CAST * _CAST
        self._halves = buffer[:half], buffer[half : 2 * half]
        self._copied: list[Event | None] = [None, None]
        self._turn = 0
        self._casts = device.further_stream()
        self._begun: Event | None = None

    def begin(self) -> None:
        """Let what is sent from now on be read after all that the lane has waited for."""
        if self._casts is not None:
            self._begun = self._device.current_stream().record_event()

    def send(self, target: Tensor, total: Tensor | None) -> None:
        """Queue the copy of a flat sum to the host, in the dtype of `target`; None is zero."""
        most = self._halves[0].nbytes // target.element_size()
        for start in range(0, len(target), most):
            span = slice(start, min(start + most, len(target)))
            size = (span.stop - span.start) * target.element_size()
            piece = self._halves[self._turn][:size].view(target.dtype)
            self._cast(piece, None if total is None else total[span])
            self._device.copy(target[span], piece)
            if self._casts is not None:
                self._copied[self._turn] = self._device.current_stream().record_event()
            self._turn = 1 - self._turn

    def _cast(self, piece: Tensor, total: Tensor | None) -> None:
        if self._casts is None:
            _fill(piece, total)
            return
        with self._casts:
            for event in (self._begun, self._copied[self._turn]):
                if event is not None:
                    self._casts.wait_event(event)
            _fill(piece, total)
            cast = self._casts.record_event()
        self._device.current_stream().wait_event(cast)


def _fill(piece: Tensor, total: Tensor | None) -> None:
    if total is None:
        piece.zero_()
    else:
        piece.copy_(total)


def _users(slot_of: Mapping[User, SlotId]) -> dict[SlotId, list[User]]:
    """Return who visits each slot."""
    users: dict[SlotId, list[User]] = {}
    for user, slot in slot_of.items():
        users.setdefault(slot, []).append(user)
    return users


def _homes(
    store: Store, blocks: Sequence[int], ring_slot_of: Mapping[int, SlotId]
) -> dict[str, Tensor]:
    """Return where the gradients of params wait for their update, if that is in the store."""
    trained = [
        place.param.name
        for block in blocks
        if block not in ring_slot_of
        for segment in store.layout.trained_segments(block)
        for place in store.layout.segment_places(segment)
    ]
    return {name: store.param(name, Kind.GRAD) for name in trained}


def _cuts(layout: Layout, names: Sequence[str], num_pieces: int) -> dict[str, list[slice]]:
    """Return the rows of each piece, by param."""
    if num_pieces == 1:
        return {}
    params = [layout.places[name].param for name in names if name in layout.places]
    return {param.name: vocabulary_pieces(param.shape[0], num_pieces) for param in params}


def _cut(buffer: Tensor, segments: Sequence[Segment]) -> Iterator[tuple[Segment, Tensor]]:
    """Yield the segments, one after the other in `buffer`."""
    start = 0
    for segment in segments:
        stop = start + len(segment.owned) * segment.dtype.itemsize
        yield segment, buffer[start:stop].view(segment.dtype)
        start = stop
