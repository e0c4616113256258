"""The cost of a collective: bytes that others have, over the network between them and us.

    gather      into a slot, from each of the others its part
    exchange    a gradient: to each of the others its part; a rank adds up what it then has

Inside a host a rank has its own rate. Over the network a host's ranks divide its rate; a gather
between devices crosses it once for all of them, because devices pass on what they have got
(a ring), an exchange for each of them. Both ways are used at once, so the slower one counts.

Law (tests/planning/ranks/test_collectives.py): bytes are those that the engine moves.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.planning.machine.network import Network
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.model.shapes import BlockShape, Dtype
from megatrain.planning.ranks.division import Division

PLANNED_EXCHANGE_BYTES = 64 << 20
"""The same number as in engine/exchange.py, which needs torch; a test compares them."""
ADDED_BYTES = 16
"""Device memory traffic of an exchange per element: rounded sums written, parts read and added."""
_PEER_PASSES, _HOST_PASSES = 2, 4
"""How often host memory is passed by a byte between devices of a host, and of two hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """The cost of one collective for a rank."""

    seconds: float
    num_bytes: int
    """Bytes that the rank gets, or sends."""
    dram_bytes: float
    """Host memory traffic."""
    link_share: float
    """Share of the rank's link that it uses, both ways, while it lasts."""


class Collectives:
    """The collectives of one rank."""

    def __init__(self, profile: MachineProfile, division: Division, dtype: Dtype) -> None:
        assert profile.network is not None, f"{profile.name}: nothing is known between ranks"
        self._profile, self._division, self._dtype = profile, division, dtype
        self._network: Network = profile.network
        if division.num_hosts > 1:
            assert self._network.host_bytes_per_s is not None, f"no network: {self._network}"

    @property
    def latency_s(self) -> float:
        """Latency of the smallest collective: one message from each of the others."""
        between_hosts = self._division.num_hosts > 1
        network = self._network
        hop = network.host_latency_s if between_hosts else network.peer_latency_s
        return hop * (self._division.size - 1)

    def gather(self, block: BlockShape) -> Collective:
        """Return what it takes to gather a block's weights."""
        whole = block.weight_bytes(self._dtype, self._division.gathered)
        num_bytes = whole - whole // self._division.size
        segments = len(block.segments(self._dtype))
        passes_on = self._profile.device_bytes > 0
        return self._moved(num_bytes, num_collectives=segments, passes_on=passes_on)

    def collect(self, block: BlockShape) -> Collective:
        """Return what it takes to gather the directions of a block's matrices."""
        whole = block.matrix_elements(self._division.gathered) * (4 if self._dtype == "fp32" else 2)
        num_bytes = whole - whole // self._division.size
        passes_on = self._profile.device_bytes > 0
        return self._moved(num_bytes, num_collectives=1, passes_on=passes_on)

    def smallest(self) -> Collective:
        """Return what it takes to say a few numbers."""
        return self._moved(0, num_collectives=1)

    def exchange(self, block: BlockShape) -> Collective:
        """Return what it takes to exchange a block's gradient, without its sums."""
        dtype, owned = self._dtype, self._division.owned
        whole = block.gradient_bytes(dtype)
        num_bytes = whole - block.gradient_bytes(dtype, owned)
        rounds = -(-whole // PLANNED_EXCHANGE_BYTES)
        share = self._network.exchange_share
        return self._moved(num_bytes, num_collectives=rounds, share=share)

    def added_seconds(self, block: BlockShape) -> float:
        """Return the time in which the device rounds and adds what is exchanged."""
        return ADDED_BYTES * block.trained_elements() / self._profile.device_bytes_per_s

    def _moved(
        self, num_bytes: int, *, num_collectives: int, passes_on: bool = False, share: float = 1.0
    ) -> Collective:
        division, network = self._division, self._network
        far = num_bytes * (division.size - division.per_host) / (division.size - 1)
        near = num_bytes if passes_on and division.per_host > 1 else num_bytes - far
        crossing = far if passes_on else far * division.per_host
        seconds = near / network.peer_bytes_per_s / share
        if network.host_bytes_per_s is not None:
            seconds = max(seconds, crossing / network.host_bytes_per_s / share)
        seconds += num_collectives * self.latency_s
        through_host = 0.0 if network.own_links else near
        profile = self._profile
        link = min(profile.copy_in_bytes_per_s, profile.copy_out_bytes_per_s)
        return Collective(
            seconds=seconds,
            num_bytes=num_bytes,
            dram_bytes=_PEER_PASSES * through_host + _HOST_PASSES * far,
            link_share=min(1.0, (through_host + far) / link / seconds),
        )
