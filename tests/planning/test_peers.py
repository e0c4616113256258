"""The plan of rounds with peers."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.config.sections import PeerSettings
from megatrain.errors import ConfigError
from megatrain.peers.compression import compression_of
from megatrain.planning.estimate import estimate
from megatrain.planning.peers import PeerPlan, bits_per_param, link_bytes_per_s


@pytest.mark.parametrize(
    "changes",
    [
        {"compression": "none"},
        {"compression": "int8"},
        {},
        {"density": 0.1, "bits": 2},
        {"density": 0.3},
    ],
    ids=str,
)
def test_bytes_are_those_of_the_form(changes: dict[str, Any]) -> None:
    settings, size = PeerSettings(**changes), 1 << 24
    form = compression_of(settings.compression, density=settings.density, bits=settings.bits)
    assert bits_per_param(settings) * size / 8 == pytest.approx(form.most_bytes(size), rel=0.002)


def _plan(uplink: str = "20Mbit", peers: int = 16, *words: str) -> PeerPlan:
    found = estimate(
        "Qwen/Qwen3-8B", [*words], gpu="4090", ram="128GB", batch_tokens="32k",
        peers=peers, uplink=uplink,
    ).peers  # fmt: skip
    assert found is not None
    return found


def test_8b_on_a_home_connection() -> None:
    plan = _plan()
    assert plan.difference_bytes == pytest.approx(8.19e9 * 0.1895 / 8, rel=0.01)
    assert 70 < plan.up_s < 95
    assert plan.utilization(plan.late_needed) > 0.95 > 0.6 > plan.utilization(0)
    assert (plan.fits, plan.fits_in_memory) == (True, False)
    assert plan.copy_bytes * plan.parts == pytest.approx(4 * 8.19e9, rel=0.01)
    asked = _plan("20Mbit", 16, "peers.parts=15")
    assert (asked.parts, asked.utilization(2) > 0.95 > asked.utilization(1)) == (15, True)
    assert plan.utilization(plan.late_needed) >= _plan("10Mbit").utilization(30)
    assert plan.utilization(30) >= _plan("20Mbit", 32).utilization(30)
    assert plan.utilization(30) > _plan("20Mbit", 16, "peers.compression=none").utilization(30)


def test_all_tokens_are_those_of_all_peers() -> None:
    """Each trains its part of them, and waits as its settings make it wait."""
    machine: dict[str, Any] = {"gpu": "4090", "ram": "128GB", "tokens": "1e9", "price": 5.44}
    alone = estimate("Qwen/Qwen3-8B", **machine)
    assert alone.seconds is not None
    for late in (0, 9):
        changed = ["peers.parts=3", f"peers.late={late}"]
        found = estimate("Qwen/Qwen3-8B", changed, peers=16, uplink="20Mbit", **machine)
        assert found.peers is not None
        share = found.peers.utilization(late)
        own = found.plan.simulation.tokens_per_s
        assert found.seconds is not None
        assert found.seconds == pytest.approx(1e9 / (16 * own * share))
        assert alone.seconds / 17 < found.seconds < alone.seconds / 8
        assert found.cost == pytest.approx(found.seconds / 3600 * 5.44)
        assert "by 16 peers" in str(found).splitlines()[0]


def test_links_are_read_as_people_write_them() -> None:
    assert link_bytes_per_s("uplink", "20Mbit") == link_bytes_per_s("uplink", "20 mbit/s")
    assert link_bytes_per_s("uplink", "1Gbit") == pytest.approx(0.94e9 / 8)
    with pytest.raises(ConfigError, match="--uplink is fast: give a rate, like 20Mbit or 1Gbit"):
        link_bytes_per_s("uplink", "fast")
    with pytest.raises(ConfigError, match="--peers and --uplink go together"):
        estimate("Qwen/Qwen3-8B", gpu="4090", peers=16)
