"""Ranks measure what is between them, and all find the same."""

from __future__ import annotations

import platform
import time

import pytest
from torch import Tensor

from megatrain.devices.device import CpuDevice
from megatrain.doctor import between_ranks
from megatrain.doctor.between_ranks import measured_network
from megatrain.planning.machine.network import Network
from megatrain.ranks.ranks import Ranks
from testkit.machines import DESKTOP, PROCESSOR
from testkit.rank_threads import Together

SLOW_S = 0.3
"""Far more than a small gather takes between threads, however busy the machine is."""


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between_ranks, "LARGE_BYTES", 1 << 20)
    monkeypatch.setattr(between_ranks, "ROUNDS", 2)


def found_by(size: int, *, slow_s: float = 0.0) -> list[Network]:
    def measure(ranks: Ranks) -> Network:
        gather = ranks.wire.gather

        def slowed(parts: Tensor) -> None:
            gather(parts)
            time.sleep(slow_s if parts.nbytes > between_ranks.SMALL_BYTES else 0.0)

        ranks.wire.gather = slowed  # type: ignore[method-assign]
        return measured_network(ranks, CpuDevice(copying=True), PROCESSOR)

    return Together(size).run(measure)


def test_a_slow_wire_is_measured_as_slow() -> None:
    network = found_by(2, slow_s=SLOW_S)[0]
    assert network.peer_bytes_per_s < 3 * (1 << 19) / SLOW_S


def test_between_hosts_it_is_the_network_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter("abab")
    monkeypatch.setattr(platform, "node", lambda: next(names))

    def measure(ranks: Ranks) -> Network:
        return measured_network(ranks, CpuDevice(copying=True), DESKTOP)

    network = Together(4).run(measure)[0]
    assert network.host_bytes_per_s is not None
    assert network.cores == 0.0
