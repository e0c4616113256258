"""The ranks in the text of a plan: how many, where, and which of its figures is of whom."""

from __future__ import annotations

from megatrain.memory.ledger import Ledger, gib
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.ranks.division import Division
from megatrain.planning.workload import Workload


def rank_lines(profile: MachineProfile, workload: Workload, ledger: Ledger) -> list[str]:
    """Return the lines about ranks in a plan's heading; none for a process alone."""
    division, network = workload.division, profile.network
    if division.is_alone or network is None:
        return []
    rates = [f"{network.peer_bytes_per_s / 1e9:.3g} GB/s between ranks of a host ({network.name})"]
    if division.per_host == 1:
        rates = []
    if division.num_hosts > 1 and network.host_bytes_per_s is not None:
        rates.append(f"{network.host_bytes_per_s / 1e9:.3g} GB/s between hosts")
    host = ledger.total("host")
    return [
        f"ranks     {division}; each owns 1/{division.size} of the model",
        *(f"          {rate}" for rate in rates),
        f"          host memory: {gib(host // division.per_host)} a rank, {gib(host)} a host, "
        f"{gib(host * division.num_hosts)} in all",
    ]


def whose(place: str, division: Division) -> str:
    """Return of whom the bytes of a place are, as the end of a line; empty for a process alone."""
    if division.is_alone:
        return ""
    hosts = ", each host" if division.num_hosts > 1 else ", all ranks"
    return {"host": hosts, "tier": hosts, "device": ", each rank", "disk": ", in all"}[place]
