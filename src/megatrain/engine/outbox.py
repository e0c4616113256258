"""The outbox: where a gradient takes the dtype it has on the host, on its way there.

A copy cannot change the dtype on its way without a buffer that somebody has to allocate. This is
that buffer, piece by piece: cast a piece, copy it out, cast the next. All on the out lane, whose
order is all the protection it needs. Casting is a few percent of copying, and the buffer does not
grow with the largest block (an embedding of a gigabyte would want another).
"""

from __future__ import annotations

from torch import Tensor

from megatrain.devices.device import Device

OUTBOX_BYTES = 64 << 20


class Outbox:
    """One buffer on the device. Of the out lane alone."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._device = device
        self._buffer = device.allocate(num_bytes, "outbox")

    def send(self, target: Tensor, total: Tensor | None) -> None:
        """Copy a flat sum to the host, in the dtype of `target`; None is zero."""
        most = self._buffer.nbytes // target.element_size()
        for start in range(0, len(target), most):
            span = slice(start, min(start + most, len(target)))
            size = (span.stop - span.start) * target.element_size()
            piece = self._buffer[:size].view(target.dtype)
            if total is None:
                piece.zero_()
            else:
                piece.copy_(total[span])
            self._device.fill(target[span], piece)
