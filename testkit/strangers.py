"""A stranger on the network: the ports of a run that it reaches, and the pickles it leaves there.

The walk is psutil's and the client torch's own, so they see what is there and not what we believe.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from testkit.patience import HANG_S

Listener = tuple[str, int]
"""Address and port."""
LOOPBACK = {"127.0.0.1", "::1"}
_ANSWER_S = 2.0
"""Within so long a store answers; a port that is not a store's never does."""


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


def plant(
    folder: Path, ports: Iterable[int], encode: Callable[[bytes], bytes] = bytes
) -> dict[int, list[str]]:
    """Leave a pickle at all ports; return the keys that were overwritten, by port of a store.

    It is written to every key that a store has, and sent as plain bytes. Where it is unpickled,
    `folder` appears. The rendezvous of torchrun expects it encoded by `base64.b64encode`.
    """
    data = encode(pickle.dumps(Bomb(folder), protocol=0))
    ports = sorted(ports)
    with ThreadPoolExecutor(max(1, len(ports))) as pool:
        found = pool.map(lambda port: _plant(port, data), ports)
        return {port: keys for port, keys in zip(ports, found, strict=True) if keys is not None}


def _plant(port: int, data: bytes) -> list[str] | None:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), HANG_S) as plain:
        plain.sendall(data)
    said: Future[list[str]] = Future()

    def write() -> None:
        with suppress(RuntimeError):
            store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                "127.0.0.1", port, timeout=timedelta(seconds=_ANSWER_S), wait_for_workers=False
            )
            keys: list[str] = store.list_keys()
            for key in keys:
                store.set(key, data.decode())
            said.set_result(keys)

    # A client waits without a limit for a port that is not a store's.
    threading.Thread(target=write, daemon=True).start()
    with suppress(TimeoutError):
        return said.result(2 * _ANSWER_S)
    return None
