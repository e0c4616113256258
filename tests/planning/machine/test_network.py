"""A network is kept with its machine, and one that cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.errors import ConfigError
from megatrain.planning.machine.network import Network
from megatrain.planning.machine.profile import MachineProfile
from testkit.machines import DESKTOP


def test_a_profile_keeps_its_network() -> None:
    network = Network(name="measured", peer_bytes_per_s=2e9, host_bytes_per_s=1e9, cores=0.5)
    profile = DESKTOP.changed(network=network)
    assert MachineProfile.from_json(profile.to_json()) == profile
    assert MachineProfile.from_json(DESKTOP.to_json()).network is None


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"peer_bytes_per_s": 0}, "peer_bytes_per_s is 0"),
        ({"peer_bytes_per_s": 1e9, "host_bytes_per_s": -1.0}, "host_bytes_per_s is -1.0"),
        ({"peer_bytes_per_s": 1e9, "exchange_share": float("nan")}, "exchange_share is nan"),
        ({"peer_bytes_per_s": 1e9, "speed": 3}, "unknown keys speed"),
        ({}, "peer_bytes_per_s"),
    ],
)
def test_figures_that_cannot_be_are_named(facts: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Network.from_facts(facts)


def test_a_faster_network_has_more_of_both_rates() -> None:
    network = Network(peer_bytes_per_s=2e9, host_bytes_per_s=1e9)
    faster = network.faster(4)
    assert (faster.peer_bytes_per_s, faster.host_bytes_per_s) == (8e9, 4e9)
    assert Network(peer_bytes_per_s=2e9).faster(2).host_bytes_per_s is None
