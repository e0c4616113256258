"""The network that a person means by `--network`: a name, or a rate.

A connection sustains 94 % of its bits per second at most, what packets leave. Messages between
hosts take longer by way of the kernel than with RDMA.

Law (tests/planning/catalog/test_networks.py): `--network` takes a name as people write it, or GB/s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatrain.errors import ConfigError

_USABLE = 0.94
_RATE = re.compile(r"(\d+(?:\.\d+)?) ?gb/s", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNetwork:
    """The network between hosts, each way."""

    name: str
    bytes_per_s: float
    latency_s: float


def _named(name: str, gigabits: float, latency_s: float) -> HostNetwork:
    return HostNetwork(name=name, bytes_per_s=gigabits * _USABLE / 8 * 1e9, latency_s=latency_s)


NETWORKS = (
    *(_named(f"{rate}GbE", rate, 5e-5) for rate in (1, 10, 25, 40, 50, 100, 200, 400, 800)),
    _named("IB EDR", 100, 5e-6),
    _named("IB HDR", 200, 5e-6),
    _named("IB NDR", 400, 5e-6),
    _named("IB XDR", 800, 5e-6),
)


def find_network(text: str) -> HostNetwork:
    """Return the network that `--network` means. Raises ConfigError."""
    if found := _RATE.fullmatch(text.strip()):
        rate = float(found[1])
        if rate > 0:
            return HostNetwork(name=text.strip(), bytes_per_s=rate * 1e9, latency_s=5e-5)
    plain = _plain(text)
    for network in NETWORKS:
        if plain in (_plain(network.name), _plain(network.name).removeprefix("ib")):
            return network
    names = ", ".join(network.name for network in NETWORKS)
    raise ConfigError(f"--network {text[:60]}: unknown. Give a rate like 3GB/s, or one of: {names}")


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower()).replace("infiniband", "ib")
