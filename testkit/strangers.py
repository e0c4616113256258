"""A stranger on the network: the ports of a run that it reaches, and the pickles it leaves there.

The walk is psutil's and the planting torch's own client, so both see what the system has and not
what we believe.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from testkit.patience import HANG_S
from testkit.warm_python import warm_python

Listener = tuple[str, int]
"""Address and port."""
LOOPBACK = {"127.0.0.1", "::1"}
PLANT = """
import os, sys, threading
from datetime import timedelta
import torch.distributed as dist

port, data, *names = sys.argv[1:]
data, done = bytes.fromhex(data), []

def plant():
    store = dist.TCPStore("127.0.0.1", int(port), timeout=timedelta(seconds=2))
    keys = store.list_keys()
    for key in [*keys, *names]:
        store.set(key, data.decode("latin-1"))
    done.append(keys)

thread = threading.Thread(target=plant, daemon=True)
thread.start()
thread.join(2)  # a port that is not a store's never answers
if done:
    print("\\n".join(done[0]), flush=True)
os._exit(0 if done else 1)
"""


class Bomb:
    """Makes a folder when it is unpickled. Protocol 0, which is text."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._folder),)


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all that descend from it."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def listeners(*pids: int) -> set[Listener]:
    """Return where the processes listen: TCP, and UDP sockets that have a port."""
    found: set[Listener] = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(pid).net_connections("inet"):
                is_udp = one.type == socket.SOCK_DGRAM and not one.raddr
                if one.status == psutil.CONN_LISTEN or is_udp:
                    found.add((one.laddr.ip, one.laddr.port))
    return found


def plant(folder: Path, ports: Iterable[int], names: Iterable[str] = ()) -> dict[int, list[str]]:
    """Leave pickles at all ports; return the keys that were overwritten, by port of a store.

    Each is written to every key that a store has and to `names`, and sent as plain bytes.
    Where one is unpickled, `folder` appears.
    """
    data = pickle.dumps(Bomb(folder), protocol=0)
    reached = {}
    for port in ports:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), HANG_S) as plain:
            plain.sendall(data)
        done = subprocess.run(
            [*warm_python().command, "-c", PLANT, str(port), data.hex(), *names],
            stdout=subprocess.PIPE, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
        if done.returncode == 0:
            reached[port] = done.stdout.split("\n")[:-1]
    return reached
