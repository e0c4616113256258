"""Filling a tier from a folder or a checkpoint, in pieces that arrive in any order.

A chunk of a part is put together in memory and written when its last byte has arrived, so only the
chunks at the edges of what workers read now are held, not a block.

Laws (tests/memory/tier/test_filling.py)
    1. The tier has the bytes that were put, whatever their order, and zeros elsewhere.
    2. Of pieces in order, a few chunks are held at a time, whatever the number of blocks.
"""

from __future__ import annotations

import threading
from typing import Self

from torch import Tensor

from megatrain.memory.arena import aligned_buffer
from megatrain.memory.direct import copy_bytes
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import Layout
from megatrain.memory.tier.scratch_file import Tier

_Chunk = tuple[int, TensorKind, int]


class TierFilling:
    """Takes pieces on any thread; at the end of its `with` block all of them are in the tier."""

    def __init__(self, layout: Layout, tier: Tier) -> None:
        self._layout = layout
        self._tier = tier
        self._lock = threading.Lock()
        self._open: dict[_Chunk, tuple[Tensor, list[int]]] = {}
        """Bytes of a chunk, and how many have not arrived."""
        self._spans: dict[tuple[int, TensorKind], list[tuple[int, int]]] = {}

    def put(self, name: str, kind: TensorKind, start: int, data: Tensor) -> None:
        """Put bytes of a param, from its byte `start` on, where they belong. Raises DiskError."""
        place = self._layout.places[name]
        block, regions = place.segment.block, self._tier.regions
        begin = regions.numbers(place, kind).start - regions.part(block, kind).start + start
        end = begin + len(data)
        for number, first, last in self._tier.chunks(block, kind, begin, end):
            low, high = max(begin, first), min(end, last)
            with self._lock:
                if (block, kind, number) not in self._open:
                    self._open[block, kind, number] = self._opened(block, kind, first, last)
            self._put((block, kind, number), low - first, data[low - begin : high - begin])

    def _put(self, chunk: _Chunk, start: int, data: Tensor) -> None:
        buffer, missing = self._open[chunk]
        copy_bytes(buffer[start : start + len(data)], data)
        with self._lock:
            missing[0] -= len(data)
            if missing[0] > 0:
                return
            self._open.pop(chunk, None)
        self._tier.put(*chunk, buffer)

    def _opened(
        self, block: int, kind: TensorKind, first: int, last: int
    ) -> tuple[Tensor, list[int]]:
        if (block, kind) not in self._spans:
            self._spans[block, kind] = self._held(block, kind)
        spans = self._spans[block, kind]
        missing = sum(max(0, min(stop, last) - max(start, first)) for start, stop in spans)
        return aligned_buffer(last - first)[: last - first], [missing]

    def _held(self, block: int, kind: TensorKind) -> list[tuple[int, int]]:
        """Return the bytes of a part that belong to params, and are not padding."""
        origin = self._layout.block_extents[block, kind].start
        extents = [p.extent(kind) for p in self._layout.block_places(block) if p.has(kind)]
        return [(extent.start - origin, extent.stop - origin) for extent in extents]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failure: type[BaseException] | None, *rest: object) -> None:
        """Write the chunks of which a part never came, unless something failed."""
        chunks, self._open = self._open, {}
        if failure is None:
            for chunk, (buffer, _) in chunks.items():
                self._tier.put(*chunk, buffer)
