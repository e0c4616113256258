"""From what tiles hand over to what the mixer gets: tensors of the full row, written by tiles.

Laws (tests/models/tiling/test_cut.py)
    1. A tensor of the row has the strides' order of its tiles, so that kernels see the layout
       that the layer's own code makes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatrain.models.stand_ins import Call
from megatrain.models.tiling.cut import Cut, Meeting
from megatrain.models.tiling.trees import TensorPath, tensors_by_path, with_tensors


class Joining:
    """One row's call of the mixer, while its tiles come in."""

    def __init__(self, cut: Cut, call: Call, length: int) -> None:
        """`call` is the layer's, with the arguments of the full row."""
        self._cut, self._length = cut, length
        self._given = dict(tensors_by_path((call.args, call.kwargs)))
        self._meeting: Meeting | None = None
        self.handed: dict[TensorPath, Tensor] = {}
        """What tiles have made for the mixer, by path in its arguments."""

    def add(self, meeting: Meeting, tile_call: Call, columns: slice) -> None:
        """Take in what the tile of `columns` hands over; `tile_call` was its layer's call."""
        if self._meeting is None:
            self._meeting = self._of_row(meeting, tile_call)
        for path, part in handed_of(self._cut, meeting, tile_call).items():
            dim = self._cut.handed[path]
            row = self.handed[path]
            row.narrow(dim, columns.start, columns.stop - columns.start).copy_(part)

    def meeting(self) -> Meeting:
        """Return the mixer's call for the row."""
        assert self._meeting is not None
        return self._meeting

    def _of_row(self, meeting: Meeting, tile_call: Call) -> Meeting:
        given = _given(tile_call)
        parts = handed_of(self._cut, meeting, tile_call)

        def row(path: TensorPath, tensor: Tensor) -> Tensor:
            if path in parts:
                self.handed[path] = _lengthened(tensor, self._cut.handed[path], self._length)
                return self.handed[path]
            return self._given[given[id(tensor)]] if id(tensor) in given else tensor

        args, kwargs = with_tensors((meeting.args, meeting.kwargs), row)
        return replace(meeting, args=args, kwargs=kwargs)


def handed_of(cut: Cut, meeting: Meeting, tile_call: Call) -> dict[TensorPath, Tensor]:
    """Return the mixer's arguments that the tile's own code has made, by path."""
    given = _given(tile_call)
    tensors = tensors_by_path((meeting.args, meeting.kwargs))
    return {p: t for p, t in tensors if id(t) not in given and p in cut.handed}


def _given(call: Call) -> dict[int, TensorPath]:
    return {id(tensor): path for path, tensor in tensors_by_path((call.args, call.kwargs))}


def _lengthened(tile: Tensor, dim: int, length: int) -> Tensor:
    """Return an empty tensor like `tile` for `length` tokens."""
    sizes = [length if d == dim else size for d, size in enumerate(tile.shape)]
    order = sorted(range(tile.dim()), key=tile.stride, reverse=True)
    empty = torch.empty([sizes[d] for d in order], dtype=tile.dtype, device=tile.device)
    return empty.permute([order.index(d) for d in range(tile.dim())])
