"""The network between ranks: links inside a host, and a network between hosts.

Rates are those of one direction while both are in use, which is what collectives do. Between hosts
all ranks of a host share one rate.

Law (tests/planning/machine/test_network.py): a rate that is not a positive number is a ConfigError
that names the field.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from megatrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Measured by doctor under torchrun, or looked up."""

    name: str = "assumed"
    """For people: where the figures are from."""
    peer_bytes_per_s: float
    """Bytes per second that a rank gets from the others of its host, all at once."""
    peer_latency_s: float = 3e-5
    """Latency of one message between them."""
    own_links: bool = False
    """Devices have links to each other. Else their bytes take host memory and the ranks' links."""
    host_bytes_per_s: float | None = None
    """Bytes per second that a host gets from all others; None: not known."""
    host_latency_s: float = 1e-4
    exchange_share: float = 1.0
    """The rate of an exchange over that of a gather."""
    cores: float = 0.0
    """Host cores that the collectives of a rank keep busy."""

    def __post_init__(self) -> None:
        rates = ("peer_bytes_per_s", "peer_latency_s", "host_latency_s", "exchange_share")
        given = [name for name in (*rates, "host_bytes_per_s") if getattr(self, name) is not None]
        for name in given:
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ConfigError(f"network {self.name}: {name} is {value}, must be positive")

    def faster(self, times: float) -> Network:
        """Return a network with so many times the rates."""
        between = None if self.host_bytes_per_s is None else times * self.host_bytes_per_s
        peers = times * self.peer_bytes_per_s
        return replace(self, peer_bytes_per_s=peers, host_bytes_per_s=between)

    def facts(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)

    @classmethod
    def from_facts(cls, facts: dict[str, Any]) -> Network:
        """Return what `facts` describes. Raises ConfigError."""
        if unknown := sorted(set(facts) - {field.name for field in fields(cls)}):
            raise ConfigError(f"network: unknown keys {', '.join(unknown)}")
        try:
            return cls(**facts)
        except TypeError as error:
            raise ConfigError(f"network: {error}") from None
