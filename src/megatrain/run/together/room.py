"""The memory that ranks plan with: that of the host that has least, as if all were like it.

Laws (tests/run/together/test_room.py)
    1. All ranks get the same figures, and no host has less than they say.
    2. What the ranks of a host hold counts as theirs: together they may use it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from megatrain.planning.ranks.division import SOLE_RANK, Division
from megatrain.ranks.ranks import Ranks
from megatrain.run.together.sight import hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes of a host and of a device, as one process sees them, or of all ranks of a host."""

    free_bytes: int
    """Of host memory."""
    held_bytes: int
    """By this process, or by all ranks of the host."""
    device_bytes: int
    disk_bytes: int


def least_room(ranks: Ranks, own: Room) -> Room:
    """Return the room on the host that has least; of the device, the least of all."""
    if ranks.owner.is_alone:
        return own
    of_rank = [Room(**said) for said in ranks.agree(asdict(own))]
    of_host: dict[str, list[Room]] = {}
    for host, room in zip(hosts(ranks), of_rank, strict=True):
        of_host.setdefault(host, []).append(room)
    together = [
        Room(
            free_bytes=min(room.free_bytes for room in rooms),
            held_bytes=sum(room.held_bytes for room in rooms),
            device_bytes=min(room.device_bytes for room in rooms),
            disk_bytes=min(room.disk_bytes for room in rooms),
        )
        for rooms in of_host.values()
    ]
    least = min(together, key=lambda room: room.free_bytes + room.held_bytes)
    return Room(
        free_bytes=least.free_bytes,
        held_bytes=least.held_bytes,
        device_bytes=min(room.device_bytes for room in together),
        disk_bytes=min(room.disk_bytes for room in together),
    )


def division_of(ranks: Ranks) -> Division:
    """Return how many hosts the ranks are on, and how many are on the fullest of them."""
    if ranks.owner.is_alone:
        return SOLE_RANK
    on_host = Counter(hosts(ranks))
    num_hosts, per_host = len(on_host), max(on_host.values())
    missing = num_hosts * per_host - ranks.owner.size
    return Division(num_hosts=num_hosts, per_host=per_host, missing=missing)
