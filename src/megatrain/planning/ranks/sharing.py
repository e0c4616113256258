"""A machine as one of the ranks on it has it: its share of what they share.

    its own        the device, its memory and its link
    shared         host memory traffic, cores and the drive, by as many as are on the host
    of the host    its memory: the ledger counts all of its ranks

Where compute is on the host's cores, a rank computes on its share of them, and weights are gathered
in slots: its memory is no longer one with that of the store.

Law (tests/planning/ranks/test_sharing.py): a process alone has all, unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.memory.kinds import update_traffic
from megatrain.optim.states import ADAMW
from megatrain.planning.machine.network import Network
from megatrain.planning.machine.profile import FlopRate, MachineProfile
from megatrain.planning.ranks.division import Division

PEERS_SHARE = 0.5
"""Share of the link's rate that devices get from each other through host memory: each byte crosses
out and in, in chunks that wait for each other."""
LOCAL_BYTES_PER_S = 1e9
"""Between processes on a CPU that was not measured."""

ASSUMED_HOST_BYTES_PER_S = 1.17e9
"""Between hosts where nothing was measured: 10GbE."""


def as_rank(profile: MachineProfile, division: Division) -> MachineProfile:
    """Return the machine that a rank of `division` has. Ask once: a share has no shares."""
    if division.is_alone:
        return profile
    near = division.per_host
    cores = profile.cores / near
    dram = profile.dram_bytes_per_s / near
    update_cores = min(profile.update_cores, max(1.0, cores / 2))
    update_rate = profile.update_params_per_s * update_cores / profile.update_cores
    if near > 1:
        update_rate = min(update_rate, dram / update_traffic(ADAMW))
    return _on_cores(profile, cores).changed(
        unified=False,
        cores=cores,
        dram_bytes_per_s=dram,
        update_params_per_s=update_rate,
        update_cores=update_cores,
        disk_read_bytes_per_s=profile.disk_read_bytes_per_s / near,
        disk_write_bytes_per_s=profile.disk_write_bytes_per_s / near,
        network=_between(profile.network or assumed_network(profile), division),
    )


def _on_cores(profile: MachineProfile, cores: float) -> MachineProfile:
    """Return the machine with compute on so many cores, if it is on the host's."""
    if profile.compute_cores <= cores:
        return profile
    share = cores / profile.compute_cores
    return profile.changed(
        forward_flops=_scaled(profile.forward_flops, share),
        backward_flops=_scaled(profile.backward_flops, share),
        device_bytes_per_s=profile.device_bytes_per_s * share,
        compute_cores=cores,
    )


def _scaled(points: tuple[FlopRate, ...], share: float) -> tuple[FlopRate, ...]:
    return tuple(point._replace(flops=point.flops * share) for point in points)


def _between(network: Network, division: Division) -> Network:
    """Return the network with a rate between hosts, if there are several."""
    if division.num_hosts == 1 or network.host_bytes_per_s is not None:
        return network
    return replace(network, host_bytes_per_s=ASSUMED_HOST_BYTES_PER_S)


def assumed_network(profile: MachineProfile) -> Network:
    """Return what is between ranks of one host, where it was not measured."""
    if not profile.device_bytes:
        return Network(peer_bytes_per_s=LOCAL_BYTES_PER_S, peer_latency_s=2e-4, cores=1.0)
    link = min(profile.copy_in_bytes_per_s, profile.copy_out_bytes_per_s)
    return Network(name="through host memory", peer_bytes_per_s=PEERS_SHARE * link)
