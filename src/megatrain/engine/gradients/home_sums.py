"""Sums at home: the policy where compute shares the host's memory.

A gradient has a home, the place where the optimizer reads it, and as little as possible is anywhere
else:

    one part             is kept as it came, or goes home at once if it comes as several
    more parts           add up at home, if that is in fp32, else in the slot
    rows of some tokens  add to those rows of the sum alone

Where updates run in backward the home is a ring that other layers use meanwhile: then the sum of a
layer has no home, and is in the slot until it is drained. Embedding and head have a place in the
ring that no layer uses.

Laws (tests/engine/gradients/test_sums.py, test_home_sums.py)
    1. Sums are in fp32, in the order of the parts, whatever the dtype of the parts, and rounded
       once.
    2. A param that gets no gradient counts as zero; no offset ever shifts, and padding is zero.
    3. What an earlier tenant left in a slot is never seen again.
    4. A part may come as several, some rows each, or as the rows that are not zero: the sum is the
       same, bit for bit, with a home and without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatrain.engine.gradients.slots import GradSlots
from megatrain.memory.layout import Segment
from megatrain.step.ops import SlotId


class HomeSums:
    """Sums that are at home, or go there when they are drained."""

    def __init__(self, slots: GradSlots, homes: Mapping[str, Tensor]) -> None:
        """`homes` are where gradients wait for their update, by param: compute may write there."""
        self._slots = slots
        self._homes = homes
        self._sums: dict[SlotId, dict[str, _Sum]] = {slot: {} for slot in slots}

    def begin(self, slot: SlotId) -> None:
        """Forget what the slot holds: every sum is zero."""
        self._sums[slot] = {}

    def add(
        self,
        slot: SlotId,
        tenant: int,
        grads: Mapping[str, Tensor],
        first_row: int | None = None,
    ) -> None:
        """Add gradients by param name. Parts may be kept until the slot is drained.

        With `first_row` they have some rows only, from that one on; nothing is kept then, and
        rows that are new must follow on those before.
        """
        for name, grad in grads.items():
            total = self._sum(slot, tenant, name)
            if first_row is None:
                total.add(grad)
            else:
                total.add_from(first_row, grad)

    def add_rows(self, slot: SlotId, tenant: int, name: str, ids: Tensor, grad: Tensor) -> None:
        """Add a gradient that is zero but for the rows `ids` (rows,), which are distinct."""
        self._sum(slot, tenant, name).add_rows(ids, grad)

    def _sum(self, slot: SlotId, tenant: int, name: str) -> _Sum:
        sums = self._sums[slot]
        if name not in sums:
            sums[name] = _Sum(self._slots.views[tenant][name], self._homes.get(name))
        return sums[name]

    def drain(self, slot: SlotId, tenant: int, targets: Sequence[tuple[Segment, Tensor]]) -> int:
        """Write the sums to flat `targets`, one per trained segment, in their dtype.

        Sums that are there already are not written again. Returns the bytes of the targets.
        """
        sums, num_bytes = self._sums[slot], 0
        self.begin(slot)
        for portion in self._slots.portions[tenant]:
            _, whole = targets[portion.segment]
            target = whole[portion.start : portion.start + portion.num_elements]
            padding = whole[portion.padding]
            if portion.name in sums:
                sums[portion.name].move_to(target)
            else:
                target.zero_()
            padding.zero_()
            num_bytes += target.nbytes + padding.nbytes
        return num_bytes


class _Sum:
    """The gradient of a param so far."""

    def __init__(self, slot: Tensor, home: Tensor | None) -> None:
        self._wide = slot if home is None or home.dtype is not torch.float32 else home
        """Memory for the sum in fp32."""
        self._home = home
        self._whole: Tensor | None = None
        """The sum but for `_rows`: a part as it came, at home, or in fp32. None: zero."""
        self._rows: tuple[Tensor, Tensor] | None = None
        """Numbers and values of rows that are instead of those of `_whole`."""

    def add(self, grad: Tensor) -> None:
        """Add a part, which may be kept."""
        if self._whole is not None or self._rows is not None:
            self._widen().add_(grad)
        else:
            self._whole = grad

    def add_from(self, first_row: int, grad: Tensor) -> None:
        """Add some rows of a part. New ones follow on those before."""
        num_rows, stop = 0 if self._whole is None else len(self._whole), first_row + len(grad)
        if first_row == num_rows:
            home = self._home
            place = self._wide if home is None or home.dtype is not grad.dtype else home
            assert self._whole is None or _same(self._whole, place), "the sum is not in its place"
            place[first_row:stop].copy_(grad)
            self._whole = place[:stop]
            return
        assert stop <= num_rows, f"rows {first_row} to {stop} of a sum that has {num_rows}"
        self._widen()[first_row:stop].add_(grad)

    def add_rows(self, ids: Tensor, grad: Tensor) -> None:
        """Add rows of a part that is zero elsewhere. They may be kept."""
        if self._rows is not None or (self._whole is not None and _same(self._whole, self._wide)):
            self._widen().index_add_(0, ids, grad.float())
        elif self._whole is None:
            self._rows = ids, grad
        else:
            self._rows = ids, self._whole.index_select(0, ids).float().add_(grad)

    def move_to(self, target: Tensor) -> None:
        """Write the sum to flat memory, rounded once to its dtype."""
        shaped = target.view(self._wide.shape)
        if self._whole is None:
            shaped.zero_()
        elif not _same(self._whole, shaped):
            shaped.copy_(self._whole)
        if self._rows is not None:
            ids, values = self._rows
            shaped.index_copy_(0, ids, values.to(shaped.dtype))

    def _widen(self) -> Tensor:
        """Return the sum in fp32, where it can be added to."""
        if self._whole is None:
            self._whole = self._wide.zero_()
        elif not _same(self._whole, self._wide):
            self._whole = self._wide[: len(self._whole)].copy_(self._whole)
        if self._rows is not None:
            ids, values = self._rows
            self._whole.index_copy_(0, ids, values.float())
            self._rows = None
        return self._whole


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether both begin at the same place in memory."""
    return one.data_ptr() == other.data_ptr() and one.dtype is other.dtype
