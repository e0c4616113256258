"""The outbox: where a sum takes the dtype of the host, on its way there.

A copy that changes the dtype needs a buffer. This one is filled and copied out piece by piece, so
that it does not grow with the largest block. It has two halves: while the lane's stream copies from
one, a stream of its own casts into the other, and the link does not idle.

Who waits: only these two streams, which alone use the outbox. A half is cast into when its last
copy is done, and copied when its cast is done. The host waits for neither.

Law (tests/engine/gradients/test_door.py): a drained gradient is the fp32 sum, rounded once to the
dtype of the host, however small the outbox.
"""

from __future__ import annotations

from torch import Tensor

from megatrain.devices.device import Device
from megatrain.lanes.progress import Event

OUTBOX_BYTES = 64 << 20
_CAST = 256
"""Halves of the outbox begin where every kernel can write fast."""


class Outbox:
    """Two halves of device memory. Only the out lane uses it."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        buffer, half = device.allocate(num_bytes, "outbox"), num_bytes // 2 // _CAST * _CAST
        self._halves = buffer[:half], buffer[half : 2 * half]
        self._copied: list[Event | None] = [None, None]
        self._turn = 0
        self._casts = device.role_stream("casts")
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


class DirectCopies:
    """Copies without an outbox, for a device whose slots are in the host's memory."""

    def begin(self) -> None:
        """Nothing is under way: copies are done when their call returns."""

    def send(self, target: Tensor, total: Tensor | None) -> None:
        """Copy a flat sum, in the dtype of `target`; None is zero."""
        _fill(target, total)


def _fill(piece: Tensor, total: Tensor | None) -> None:
    if total is None:
        piece.zero_()
    else:
        piece.copy_(total)
