"""The network between ranks, measured by all of them at once: doctor under torchrun.

    large gathers     bytes from others over their time
    large exchanges   the same bytes, over their time
    small gathers     what a collective takes whatever its size

A round lasts as long as its slowest rank. Of several rounds the median counts.

Laws (tests/doctor/test_between_ranks.py)
    1. All ranks find the same figures.
    2. A wire that is slowed down is measured as slow.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from megatrain.devices.device import Device
from megatrain.planning.machine.network import Network
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.ranks.sharing import assumed_network
from megatrain.ranks.ranks import Ranks

LARGE_BYTES = 32 << 20
"""Bytes that all ranks have together after a gather: a layer of a small model."""
SMALL_BYTES = 4096
ROUNDS = 7


def measured_network(ranks: Ranks, device: Device, profile: MachineProfile) -> Network:
    """Return what is between these ranks. All of them must ask."""
    heard = Counter(str(said["host"]) for said in ranks.agree({"host": platform.node()}))
    trial = _Trial(ranks, device)
    small_s, _ = trial.measured(trial.gather(SMALL_BYTES))
    gather_s, cores = trial.measured(trial.gather(LARGE_BYTES))
    exchange_s, _ = trial.measured(trial.exchange(LARGE_BYTES))
    size = ranks.owner.size
    latency_s = small_s / (size - 1)
    moved_s = max(gather_s - small_s, 1e-2 * gather_s)
    rate = LARGE_BYTES * (size - 1) / size / moved_s
    share = moved_s / max(exchange_s - small_s, 1e-2 * exchange_s)
    found = Network(
        name=f"measured, {size} ranks",
        peer_bytes_per_s=rate,
        peer_latency_s=latency_s,
        exchange_share=share,
        cores=cores if profile.on_host else 0.0,
    )
    if len(heard) == 1:
        return found
    near = max(heard.values())
    crossing = rate * (size - near) / (size - 1)
    return replace(
        found,
        peer_bytes_per_s=assumed_network(profile).peer_bytes_per_s,
        host_bytes_per_s=crossing if profile.device_bytes else crossing * near,
        host_latency_s=latency_s,
    )


class _Trial:
    """Collectives of given sizes, in rounds."""

    def __init__(self, ranks: Ranks, device: Device) -> None:
        self._ranks, self._device = ranks, device

    def gather(self, num_bytes: int) -> Callable[[], None]:
        """Return a gather of so many bytes."""
        size = self._ranks.owner.size
        parts = self._buffer(num_bytes // size * size)
        return lambda: self._do([parts], lambda: self._ranks.wire.gather(parts))

    def exchange(self, num_bytes: int) -> Callable[[], None]:
        """Return an exchange of so many bytes, of all of which a rank gets as much as it sends."""
        size = self._ranks.owner.size
        each = num_bytes // size // 2
        sent, received = (self._buffer(2 * each * size).view(torch.bfloat16) for _ in range(2))
        counts = [each] * size
        return lambda: self._do(
            [sent, received],
            lambda: self._ranks.wire.exchange(received, sent, counts, counts),
        )

    def measured(self, work: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds of a round, and the cores that this process kept busy meanwhile."""
        rounds = []
        for _ in range(1 + ROUNDS):  # the first one warms up
            self._ranks.share([0.0])
            used, begin = time.process_time(), time.perf_counter()
            work()
            self._device.synchronize()
            seconds, used = time.perf_counter() - begin, time.process_time() - used
            heard = self._ranks.share([seconds, used / seconds])
            rounds.append([max(each) for each in zip(*heard, strict=True)])
        slowest, cores = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
        return slowest, cores

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        buffer = self._device.allocate(num_bytes, "the collectives of doctor")
        return buffer.fill_(1)

    def _do(self, tensors: list[torch.Tensor], work: Callable[[], None]) -> None:
        self._device.communicate(tensors, tensors, work)
