"""Sums of pages: gradients of experts that leave the device with their page, and add up at home.

A gradient slot in fp32 is twice a block in bf16. Where it does not fit, the gradient of each page
leaves as soon as it is computed:

    only part       rounded, as it is: to where the update reads it
    first of more   in fp32, to a buffer on the host
    further parts   the sum so far comes back, the part is added, and it leaves again
    last part       the same, and the sum leaves rounded, to where the update reads it

So the sums of all parts are made by the device, in fp32 and in the order of micro-batches, as in a
slot. A page without rows moves nothing: its first part is a note, and zeros are written on the host
if no other part came.

Who waits: two streams of its own, one for each direction, and that of compute, for a buffer to be
free and for a sum to be there. `drain` lets the out lane wait until the pages of its block are
home. The host waits for nothing. The buffer on the host has one block: the next begins behind the
last part of the one before, in the stream of compute.

Laws (tests/engine/test_pages.py)
    1. A gradient is the fp32 sum of its parts in their order, rounded once. A part without rows is
       zeros.
    2. Device memory is two pages, and two more for steps of several micro-batches.
    3. A page that no part has rows for moves no byte.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.devices.device import Device
from megatrain.lanes.lane import Stream
from megatrain.lanes.progress import Event
from megatrain.memory.layout import Layout, Place, Segment
from megatrain.step.ops import Op

Targets = Sequence[tuple[Segment, Tensor]]
"""Where a block's gradient is on the host, flat, segment by segment."""


class _Page(NamedTuple):
    """Some experts of a param."""

    name: str
    first: int


class PageSums:
    """The gradients of experts, page by page. All but `finish` is of the compute lane."""

    def __init__(
        self, layout: Layout, device: Device, names: frozenset[str], page_elements: int
    ) -> None:
        """`names` are the trained params that come in pages, of `page_elements` at most."""
        self._device = device
        self._places: dict[int, dict[str, Place]] = {}
        for name in sorted(names):
            place = layout.places[name]
            self._places.setdefault(place.segment.block, {})[name] = place
        self._size = 4 * page_elements
        self._leaving = _Buffers(device, self._size)
        self._coming: _Buffers | None = None
        self._sums: Tensor | None = None
        """One block's sums in fp32, on the host."""
        self._starts: dict[str, int] = {}
        for places in self._places.values():
            start = 0
            for name, place in places.items():
                self._starts[name] = start
                start += place.param.num_elements
        self._written: dict[_Page, Event | None] = {}
        """Behind the copy that put a page's sum on the host."""
        self._fetched: dict[_Page, Tensor] = {}
        self._without: dict[int, set[tuple[str, range]]] = {}
        """The pages of each block that have had no rows so far."""
        self._lacking: dict[int, set[_Page]] = {}
        """The pages of each block that some part so far had no rows for: it counts as zeros."""
        self._home: dict[int, Event | None] = {}
        """Behind the last copy of each block."""
        self._op: Op | None = None
        self._targets: Targets = ()
        self._num_parts = 1
        self._num_added: Counter[_Page] = Counter()
        """Parts of the op that each page has had."""

    def reserve(self) -> None:
        """Make room for gradients of several parts. Nothing may be under way."""
        if self._sums is None:
            most = max(
                sum(place.param.num_elements for place in places.values())
                for places in self._places.values()
            )
            self._sums = self._device.map_host(4 * most, "sums of experts").view(torch.float32)
            self._coming = _Buffers(self._device, self._size)

    def begin(self, op: Op, targets: Targets, num_parts: int) -> None:
        """Let pages that are added from now on be those of `op`, which has so many of each."""
        assert op.block is not None
        self._op, self._targets, self._num_parts = op, targets, num_parts
        self._num_added.clear()
        if not op.adds:
            self._without[op.block], self._lacking[op.block] = set(), set()

    def expect(self, name: str, experts: range) -> None:
        """Let the sum of a page come back, if it has one: `add` follows."""
        page = _Page(name, experts.start)
        if self._is_new(name, experts):
            return
        assert self._coming is not None
        source = self._sum_of(name, experts)
        self._fetched[page] = self._coming.fill(source, behind=self._written.get(page))

    def add(self, name: str, experts: range, gradient: Tensor | None) -> None:
        """Add a part of a page's gradient, (experts, ...); None: it has no rows."""
        page, is_new = _Page(name, experts.start), self._is_new(name, experts)
        if gradient is None and not is_new and self._is_last(page):
            self.expect(name, experts)
        self._num_added[page] += 1
        without = self._without[self._block]
        if gradient is None:
            self._lacking[self._block].add(page)
        if gradient is None and is_new:
            without.add((name, experts))
        elif gradient is None and page in self._fetched:
            self._send(name, experts, self._fetched.pop(page))
        elif gradient is not None:
            without.discard((name, experts))
            flat = gradient.reshape(-1)
            self._send(name, experts, flat if is_new else self._fetched.pop(page).add_(flat))

    @property
    def _block(self) -> int:
        assert self._op is not None
        assert self._op.block is not None
        return self._op.block

    def _is_new(self, name: str, experts: range) -> bool:
        """Return whether a page has no sum so far."""
        assert self._op is not None
        is_first = not self._op.adds and not self._num_added[_Page(name, experts.start)]
        return is_first or (name, experts) in self._without[self._block]

    def _is_last(self, page: _Page) -> bool:
        """Return whether the next part of a page is its last."""
        assert self._op is not None
        return self._op.completes and self._num_added[page] == self._num_parts - 1

    def _send(self, name: str, experts: range, total: Tensor) -> None:
        """Send a sum, whose part was counted just now, where it belongs."""
        assert self._op is not None
        page, place = _Page(name, experts.start), self._places[self._block][name]
        whole = self._op.completes and self._num_added[page] == self._num_parts
        target = _part(place, self._targets, experts) if whole else self._sum_of(name, experts)
        if whole and page in self._lacking[self._block]:
            total.add_(0.0)  # a sum with zeros has no negative zero
        sent = self._leaving.empty(target, total)
        self._home[self._block] = self._written[page] = sent
        if self._coming is not None:
            self._coming.was_read()

    def _sum_of(self, name: str, experts: range) -> Tensor:
        assert self._sums is not None, "no room was made for several parts"
        place, start = self._places[self._block][name], self._starts[name]
        span = _span(place, experts)
        return self._sums[start + span.start : start + span.stop]

    def drain(self, block: int) -> None:
        """Let the stream of the lane that calls wait until the block's pages are home."""
        event = self._home.pop(block, None)
        if event is not None:
            self._device.current_stream().wait_event(event)

    def finish(self, block: int, targets: Targets) -> None:
        """Write what was not sent: zeros of pages without rows, and padding. Of the host lane."""
        places: Mapping[str, Place] = self._places.get(block, {})
        for place in places.values():
            _of(place, targets)[place.start + place.param.num_elements : place.padded_stop].zero_()
        for name, experts in self._without.get(block, ()):
            _part(places[name], targets, experts).zero_()


def _of(place: Place, targets: Targets) -> Tensor:
    (flat,) = (flat for segment, flat in targets if segment is place.segment)
    return flat


def _span(place: Place, experts: range) -> slice:
    """Return the elements of some experts, counted from the param's first."""
    size = place.param.num_elements // place.param.shape[0]
    return slice(experts.start * size, experts.stop * size)


def _part(place: Place, targets: Targets, experts: range) -> Tensor:
    """Return where the gradient of some experts is to be."""
    span = _span(place, experts)
    return _of(place, targets)[place.start + span.start : place.start + span.stop]


class _Buffers:
    """Two buffers of the device that pages pass in turn, in one direction, on a stream."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self._buffers = [device.allocate(num_bytes, "gradients of experts") for _ in range(2)]
        self._stream: Stream | None = device.further_stream()
        self._free: list[Event | None] = [None, None]
        """Behind the last use of each."""
        self._turn = 0
        self._unread: list[int] = []

    def empty(self, target: Tensor, total: Tensor) -> Event | None:
        """Copy a sum to the host, in the dtype of `target`; return the event behind the copy."""
        turn, self._turn = self._turn, 1 - self._turn
        buffer = self._buffers[turn][: target.nbytes].view(target.dtype)
        if self._stream is None:
            self._device.copy(target, buffer.copy_(total))
            return None
        compute = self._device.current_stream()
        if (free := self._free[turn]) is not None:
            compute.wait_event(free)
        buffer.copy_(total)
        filled = compute.record_event()
        with self._stream:
            self._stream.wait_event(filled)
            self._device.copy(target, buffer)
            self._free[turn] = self._stream.record_event()
        return self._free[turn]

    def fill(self, source: Tensor, behind: Event | None) -> Tensor:
        """Copy a sum from the host, once `behind` has passed; compute waits for it."""
        turn, self._turn = self._turn, 1 - self._turn
        buffer = self._buffers[turn][: source.nbytes].view(source.dtype)
        self._unread.append(turn)
        if self._stream is None:
            self._device.copy(buffer, source)
            return buffer
        with self._stream:
            for event in (self._free[turn], behind):
                if event is not None:
                    self._stream.wait_event(event)
            self._device.copy(buffer, source)
            copied = self._stream.record_event()
        self._device.current_stream().wait_event(copied)
        return buffer

    def was_read(self) -> None:
        """Note that all that reads what was filled is queued."""
        if self._stream is not None and self._unread:
            read = self._device.current_stream().record_event()
            for turn in self._unread:
                self._free[turn] = read
        self._unread.clear()
