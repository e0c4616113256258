"""The store: home of every weight, master, optimizer state and waiting gradient.

In memory a kind is one arena, addressed as (block, kind, byte range) by the layout. Views handed
out are the bytes themselves, never copies, and stay valid as long as they are held. The store does
not control who writes when: the schedule does.

Kinds of the disk tier have no arena. An update brings the region of its block into a buffer
(tier/ring.py) and gets views into that.

Laws (tests/memory/test_store.py)
    1. A param's views in all kinds are disjoint from every other param's.
    2. Nothing is resident before it is written.
    3. The arenas have exactly the bytes that the ledger names, and so has the scratch file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.memory.arena import aligned_buffer, map_arena
from megatrain.memory.host import free_bytes
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import Extent, Layout, Place, Segment, kind_dtype
from megatrain.memory.ledger import Ledger, Line
from megatrain.memory.master import join
from megatrain.memory.placement import UNPLACED, Placement
from megatrain.models import optional

if TYPE_CHECKING:
    from megatrain.memory.tier.scratch_file import Scratch, Tier, TierRegions


def store_ledger(layout: Layout, regions: TierRegions | None = None) -> Ledger:
    """Return the bytes that a store of `layout` occupies once all of it was written."""
    on_disk = () if regions is None else regions.kinds
    return Ledger(
        Line(
            place="tier" if kind in on_disk else "host",
            purpose=kind.purpose,
            num_bytes=layout.kind_bytes[kind],
        )
        for kind in layout.kinds
    )


def open_store(layout: Layout, scratch: Scratch | None, placement: Placement = UNPLACED) -> Store:
    """Return a store of zeros, some kinds on disk if there is a place for them.

    Raises DoesNotFit, DiskFull or DiskError.
    """
    tier = None if scratch is None else scratch.open(layout)
    try:
        return Store(layout, tier, placement)
    except BaseException:
        if tier is not None:
            tier.close()
        raise


def clone_weights(store: Store, placement: Placement = UNPLACED) -> Store:
    """Return a store with the weights alone, as they are now. Raises DoesNotFit."""
    copied = Store(store.layout.only((TensorKind.HI,)), placement=placement)
    copied.arena(TensorKind.HI).copy_(store.arena(TensorKind.HI))
    return copied


def _arena(kind: TensorKind, num_bytes: int, placement: Placement) -> Tensor:
    """Return the zeros of a kind, where they belong: the device copies weights and gradients."""
    if kind not in (TensorKind.HI, TensorKind.GRAD):
        return map_arena(kind.name, num_bytes, placement.kept)
    if placement.allocate is not None:
        return placement.allocate(kind.name, num_bytes)
    return map_arena(kind.name, num_bytes, placement.copied(num_bytes))


class Store:
    """The arenas of a layout, and its scratch file if some kinds are on disk."""

    def __init__(
        self, layout: Layout, tier: Tier | None = None, placement: Placement = UNPLACED
    ) -> None:
        """Map the arenas. Raises DoesNotFit if their bytes are not free; touches none of them.

        The kinds of `tier` get no arena. The store closes it.
        """
        store_ledger(layout, None if tier is None else tier.regions).require("host", free_bytes())
        self.layout = layout
        self.tier = tier
        self._arenas = {
            kind: _arena(kind, num_bytes, placement)
            for kind, num_bytes in layout.kind_bytes.items()
            if kind not in self.on_disk
        }

    @property
    def kinds(self) -> tuple[TensorKind, ...]:
        """The kinds that it keeps, in memory or on disk."""
        return self.layout.kinds

    @property
    def on_disk(self) -> tuple[TensorKind, ...]:
        """The kinds that are in the scratch file between updates."""
        return () if self.tier is None else self.tier.regions.kinds

    def arena(self, kind: TensorKind) -> Tensor:
        """Return all bytes of a kind in memory, as uint8."""
        self._require_in_memory(kind)
        return self._arenas[kind]

    def block_bytes(self, block: int, kind: TensorKind) -> Tensor:
        """Return the bytes of `block` in `kind`, as uint8: what a fetch or drain moves."""
        extent = self.layout.block_extents[block, kind]
        return self.arena(kind)[extent.start : extent.stop]

    def param(self, name: str, kind: TensorKind, region: Tensor | None = None) -> Tensor:
        """Return the param's view in `kind`, in the kind's dtype and the param's shape.

        It is flat where several elements share a number, or where ranks share the param: then it
        is what is here of it. `region` has the bytes of the param's block, if the kind is on disk.
        """
        place = self.layout.places[name]
        if place.param.form:
            raise LookupError(f"{name} is narrow: ask for its bytes, or for the weight")
        numbers = self._numbers(place, kind, region).view(kind_dtype(kind, place.param.dtype))
        is_flat = kind.elements_per_number > 1 or not place.segment.owner.is_alone
        return numbers if is_flat else numbers.view(place.param.shape)

    def narrow(self, name: str) -> Tensor:
        """Return what is here of a narrow param: bytes of its form."""
        return self._numbers(self.layout.places[name], TensorKind.HI, None)

    def home(self, name: str) -> Tensor:
        """Return what is here of a param's weights as bytes, flat: as they cross the link."""
        place = self.layout.places[name]
        return self._numbers(place, TensorKind.HI, None).view(torch.uint8)

    def weight(self, name: str) -> Tensor:
        """Return a param as compute sees it, which the store has whole; a narrow one is widened."""
        param = self.layout.places[name].param
        if not param.form:
            return self.param(name, TensorKind.HI)
        return optional.widening.widened(param.form, self.narrow(name), param.shape, param.dtype)

    def segment(self, segment: Segment, kind: TensorKind, region: Tensor | None = None) -> Tensor:
        """Return what is here of a segment in `kind`, flat, with padding: for one update pass.

        `region` has the bytes of the segment's block, if the kind is on disk.
        """
        return self._numbers(segment, kind, region).view(kind_dtype(kind, segment.dtype))

    def master(self, name: str) -> Tensor:
        """Return a copy of the fp32 master of `name`. Frozen params have none but their weight."""
        weight = self.weight(name)
        if self.layout.places[name].has(TensorKind.LO):
            return join(weight, self.at_rest(name, TensorKind.LO))
        return weight.to(torch.float32, copy=True)

    def at_rest(self, name: str, kind: TensorKind) -> Tensor:
        """Return what `param` does, from the disk if the kind is there. No update may be pending.

        Reads the kind's bytes of the whole block.
        """
        if kind not in self.on_disk:
            return self.param(name, kind)
        block = self.layout.places[name].segment.block
        return self.param(name, kind, self._brought(block, kind))

    @contextmanager
    def changing(self, block: int, kind: TensorKind) -> Iterator[Tensor | None]:
        """Yield a region to give to `param`: a copy of the kind's bytes, written back at the end.

        It is None if the kind is in memory. No update may be pending.
        """
        if kind not in self.on_disk:
            yield None
            return
        assert self.tier is not None
        region = self._brought(block, kind)
        yield region
        self.tier.write(block, self.tier.regions.parts(block, region, [kind]))

    def region(self, block: int, kind: TensorKind) -> Tensor | None:
        """Return a copy of the kind's bytes of a block, to give to `segment`; None: in memory.

        No update may be pending.
        """
        return self._brought(block, kind) if kind in self.on_disk else None

    def _brought(self, block: int, kind: TensorKind) -> Tensor:
        assert self.tier is not None
        region = aligned_buffer(self.tier.regions.region_bytes(block))
        self.tier.read(block, self.tier.regions.parts(block, region, [kind]))
        return region

    def close(self) -> None:
        """Let go of the scratch file, if there is one."""
        if self.tier is not None:
            self.tier.close()

    def _numbers(self, where: Segment | Place, kind: TensorKind, region: Tensor | None) -> Tensor:
        extent: Extent
        if self.tier is not None and region is not None and kind in self.on_disk:
            extent = self.tier.regions.numbers(where, kind)
            return region[extent.start : extent.stop]
        extent = where.extent(kind)
        return self.arena(kind)[extent.start : extent.stop]

    def _require_in_memory(self, kind: TensorKind) -> None:
        if kind in self.on_disk:
            raise LookupError(
                f"{kind} is on disk: read the region of its block, and give it to the call"
            )
