"""Exchange: the gradients of all ranks become one sum, of which each rank keeps its own part.

    every rank   its sum over its own micro-batches, rounded to the dtype of the weights
    the wire     to each rank the elements that it owns, of all ranks
    every rank   what it got, added in fp32, in the order of ranks, into its place in the slot

So the bits depend on the number of ranks and on nothing else. A part passes through two buffers in
rounds, so that memory does not grow with the block.

Laws (tests/engine/test_exchange.py)
    1. What a rank owns is then the sum in fp32, in the order of ranks, of the rounded sums of all.
    2. The bytes on the wire are those of the elements that others own, each once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.batch import StepPart
from megatrain.devices.device import Device
from megatrain.memory.layout import overlap
from megatrain.ranks.ranks import Ranks

if TYPE_CHECKING:
    from megatrain.models.balance import Routing

EXCHANGE_BYTES = 64 << 20
"""Size of each of the two buffers."""


class Exchange:
    """The buffers of lane comm, and what it does with them. The order of the lane protects them."""

    def __init__(self, device: Device, ranks: Ranks, num_bytes: int) -> None:
        """`num_bytes` is the largest gradient, in the dtype of the weights."""
        size = max(ranks.owner.size * 4, min(num_bytes, EXCHANGE_BYTES))
        self._device = device
        self._ranks = ranks
        self._sent = device.allocate(size, "exchange")
        self._received = device.allocate(size, "exchange")

    def add_up(
        self, total: Tensor, elements: range, parts: Sequence[range], dtype: torch.dtype
    ) -> int:
        """Replace what this rank owns of `total`, fp32, by the sum of all ranks.

        `total` has these elements of a segment, `parts` are the elements of each rank. Returns the
        bytes that go to others.
        """
        rank, num_bytes = self._ranks.owner.rank, 0
        shares = [overlap(elements, part) for part in parts]
        sent, received = self._sent.view(dtype), self._received.view(dtype)
        most = len(sent) // len(parts)
        for begin in range(0, max(map(len, shares)), most):
            cuts = [share[begin : begin + most] for share in shares]
            counts = [len(cut) for cut in cuts]
            places = torch.split(sent[: sum(counts)], counts)
            for cut, place in zip(cuts, places, strict=True):
                place.copy_(total[cut.start - elements.start : cut.stop - elements.start])
            own = cuts[rank]
            going, coming = sent[: sum(counts)], received[: len(parts) * len(own)]
            self._device.communicate(
                [going],
                [coming],
                partial(self._ranks.wire.exchange, coming, going, [len(own)] * len(parts), counts),
            )
            target = total[own.start - elements.start : own.stop - elements.start]
            for number, part in enumerate(coming.view(len(parts), -1)):
                target.copy_(part) if number == 0 else target.add_(part)
            num_bytes += (sum(counts) - len(own)) * dtype.itemsize
        return num_bytes


class SharedRouting:
    """Counts of the routers of all ranks, added in fp32 in the order of ranks."""

    def __init__(self, device: Device, ranks: Ranks, num_experts: int) -> None:
        self._device = device
        self._ranks = ranks
        self._memory = device.allocate(ranks.owner.size * 2 * num_experts * 4, "exchange")
        self._rows = self._memory.view(torch.float32).view(ranks.owner.size, 2, num_experts)

    @property
    def own(self) -> Tensor:
        """Memory for the counts of this rank's routers. (2, experts)"""
        return self._rows[self._ranks.owner.rank]

    def add_up(self, routing: Routing, part: StepPart) -> int:
        """Make what `routing` has counted that of all ranks; return the bytes that come."""
        own_tokens = sum(micro.num_tokens for micro in part.batch)
        if not part.batch:
            self.own.zero_()
        memory = [self._memory]
        self._device.communicate(memory, memory, partial(self._ranks.wire.gather, self._memory))
        for rank in range(1, self._ranks.owner.size):
            self._rows[0].add_(self._rows[rank])
        routing.widen(self._rows[0], own_tokens, part.num_tokens)
        return self._memory.nbytes - self.own.nbytes
