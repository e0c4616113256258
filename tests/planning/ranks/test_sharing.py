"""What ranks of a host share is divided; what is their own is not."""

from __future__ import annotations

import pytest

from megatrain.planning.machine.network import Network
from megatrain.planning.ranks.division import SOLE_RANK, Division
from megatrain.planning.ranks.sharing import as_rank
from testkit.machines import DESKTOP, PROCESSOR, SERVER


def test_a_process_alone_has_all() -> None:
    for profile in (DESKTOP, SERVER, PROCESSOR):
        assert as_rank(profile, SOLE_RANK) is profile


def test_hosts_share_nothing() -> None:
    found = as_rank(SERVER, Division(num_hosts=8))
    assert found == SERVER.changed(network=found.network)


def test_ranks_of_a_host_share_its_memory_traffic_cores_and_drive() -> None:
    found = as_rank(SERVER, Division(per_host=8))
    for name in ("dram_bytes_per_s", "cores", "disk_read_bytes_per_s", "disk_write_bytes_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(SERVER, name) / 8), name
    for name in ("ram_bytes", "device_bytes", "copy_in_bytes_per_s", "forward_flops"):
        assert getattr(found, name) == getattr(SERVER, name), name
    assert found.update_params_per_s == pytest.approx(SERVER.update_params_per_s / 8)


def test_on_a_processor_they_compute_on_their_share_of_cores() -> None:
    """Eight cores, of which compute takes four."""
    two, eight = (as_rank(PROCESSOR, Division(per_host=n)) for n in (2, 8))
    assert (two.compute_cores, eight.compute_cores) == (4.0, 1.0)
    assert two.forward_flops == PROCESSOR.forward_flops
    assert eight.forward_flops[0].flops == PROCESSOR.forward_flops[0].flops / 4
    assert eight.device_bytes_per_s == PROCESSOR.device_bytes_per_s / 4
    assert not two.unified
    assert two.on_host


def test_a_measured_network_is_kept() -> None:
    known = Network(name="measured", peer_bytes_per_s=5e9)
    assert as_rank(DESKTOP.changed(network=known), Division(per_host=2)).network == known


def test_between_hosts_a_rate_is_assumed_where_none_was_measured() -> None:
    found = as_rank(DESKTOP, Division(num_hosts=2)).network
    assert found is not None
    assert found.host_bytes_per_s == 1.17e9
    assert as_rank(DESKTOP, Division(per_host=2)).network.host_bytes_per_s is None  # type: ignore[union-attr]
