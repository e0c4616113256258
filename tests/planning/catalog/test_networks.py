"""`--network` takes a name as people write it, or GB/s."""

from __future__ import annotations

import pytest

from megatrain.errors import ConfigError
from megatrain.planning.catalog.networks import find_network


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("25GbE", "25GbE"),
        ("100 gbe", "100GbE"),
        ("10GBE", "10GbE"),
        ("IB NDR", "IB NDR"),
        ("hdr", "IB HDR"),
        ("InfiniBand EDR", "IB EDR"),
    ],
)
def test_names(text: str, name: str) -> None:
    assert find_network(text).name == name


def test_rates_are_below_their_bits() -> None:
    assert find_network("25GbE").bytes_per_s == pytest.approx(2.9375e9)
    assert find_network("3GB/s").bytes_per_s == find_network("3 gb/s").bytes_per_s == 3e9


@pytest.mark.parametrize("text", ["", "fast", "25", "0GB/s", "-3GB/s", "25Gb", "IB"])
def test_others_are_refused_with_the_names(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--network .*unknown\. Give a rate like 3GB/s.*25GbE"):
        find_network(text)
