"""Which ranks see the same folder: rank 0 writes a file there, and each looks for it.

Laws (tests/run/together/test_sight.py)
    1. A folder that is not the same for all is found out before anything is written for the run.
    2. Nothing stays in the folder.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

from megatrain.errors import RunFolderError, listing
from megatrain.files import remove, write_file
from megatrain.ranks.ranks import Ranks


def hosts(ranks: Ranks) -> list[str]:
    """Return the name of each rank's host."""
    return [str(said["host"]) for said in ranks.agree({"host": socket.gethostname()})]


def neighbours(ranks: Ranks) -> list[int]:
    """Return the ranks of this host, this one included."""
    if ranks.owner.is_alone:
        return [0]
    places = hosts(ranks)
    return [rank for rank, host in enumerate(places) if host == places[ranks.owner.rank]]


def seen(ranks: Ranks, folder: Path) -> list[bool]:
    """Return, by rank, whether it sees what rank 0 writes into `folder`, which exists there."""
    name = f".seen-{secrets.token_hex(8)}" if ranks.owner.leads else ""
    if ranks.owner.leads:
        write_file(folder / name, b"", durable=False)
    try:
        name = str(ranks.agree({"name": name})[0]["name"])
        return [bool(said["sees"]) for said in ranks.agree({"sees": (folder / name).exists()})]
    finally:
        if ranks.owner.leads:
            remove(folder / name)


def require_seen(ranks: Ranks, folder: Path) -> None:
    """Raise RunFolderError unless all ranks see rank 0's run folder."""
    if ranks.owner.is_alone:
        return
    sees = seen(ranks, folder)
    places = hosts(ranks)
    blind = [f"rank {rank} on {places[rank]}" for rank, does in enumerate(sees) if not does]
    if blind:
        raise RunFolderError(
            f"save.dir: {listing(blind)} cannot see {folder}, which rank 0 on {places[0]} has "
            "opened. Ranks write a checkpoint together: set save.dir to a folder on a file system "
            "that all hosts share, by the same path."
        )
