"""Meeting: ranks find each other at a store.

The store is rank 0's, or that of torchrun's agent, which outlives a restart and still has the words
of the last attempt. So rank 0 gives each attempt its own name:

    rank 0      attempt = name                       roster = the words of who came
    rank r                       here/r = a word

A rank has joined once the roster has all ranks, with this one's own word among them. Everything
that an attempt writes into the store is under its name.

Laws (tests/ranks/test_meeting.py)
    1. Within the deadline all ranks have joined, or each says who came, from which host.
    2. Remains of an earlier attempt in the store do no harm.
    3. A port in use, and a host that does not answer, are named. No call waits longer than two
       deadlines, also for a service that accepts connections and says nothing.
    4. A store at a loopback address is reached from this host only.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import socket
import struct
import sys
import threading
import time
import uuid
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megatrain.errors import ConfigError, RankLost
from megatrain.ranks.ownership import Owner, Seat
from megatrain.ranks.torch_ranks import plain_text

Result = TypeVar("Result")
Roster = dict[int, Sequence[str]]
"""Word and host of each rank that came."""
LOOPBACK = "127.0.0.1"
_POLL_S = 0.02
_SILENT = 1.5
"""Deadlines after which a connected store counts as silent. The limits of torch end before."""
_SIOCGIFADDR = 0x8915
"""Linux: the address of an interface."""


def meet(seat: Seat, deadline_s: float) -> tuple[Store, list[str]]:
    """Return the store of this attempt and the host of each rank, once all have come."""
    return answered(seat, deadline_s, lambda: _meet(seat, deadline_s))


def answered(seat: Seat, deadline_s: float, ask: Callable[[], Result]) -> Result:
    """Return the result of `ask`, which talks to the store. Raises RankLost if that is silent.

    A client of torch waits for an answer without a limit. So `ask` has its own thread, and
    if the time runs out the connections that it made are shut down, by which the thread ends.
    """
    said: Future[Result] = Future()
    limit_s, before = _SILENT * deadline_s, _connections(seat.port)
    thread = threading.Thread(target=_run, args=(ask, said), name="meeting", daemon=True)
    thread.start()
    try:
        return said.result(limit_s)
    except TimeoutError as error:
        if said.done():
            raise
        if not _connections(seat.port).keys() - before.keys():
            raise _no_answer(seat, limit_s, error) from error
        raise RankLost(
            f"{seat.says}: {seat.address}:{seat.port} accepts connections and has not answered "
            f"for {limit_s:g} s. Another service may use this port, or the process that has the "
            "store is stopped.\n  Give another port (torchrun --master-port, or the port of "
            "--rdzv-endpoint), or end what uses this one."
        ) from error
    finally:
        if not said.done():  # also after a signal
            _hang_up(seat.port, before)
            thread.join(min(1.0, deadline_s))


def _run(ask: Callable[[], Result], said: Future[Result]) -> None:
    try:
        said.set_result(ask())
    except BaseException as error:
        said.set_exception(error)


def _connections(port: int) -> dict[int, int]:
    """Return the files of this process that are connected to a port, by their own ports."""
    return {
        found.laddr.port: found.fd
        for found in psutil.Process().net_connections("tcp")
        if found.status == psutil.CONN_ESTABLISHED and found.raddr.port == port
    }


def _hang_up(port: int, kept: Container[int]) -> None:
    """Shut down the connections of this process to a port, but those from the ports `kept`."""
    for own, fd in _connections(port).items():
        if own not in kept:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def _no_answer(seat: Seat, waited_s: float, error: Exception) -> RankLost:
    why = plain_text(error) or "no connection"
    return RankLost(
        f"{seat.says} had no answer from {seat.address}:{seat.port} within {waited_s:g} s, "
        f"where rank 0 should be: {why}\n  Is MASTER_ADDR the host of rank 0, is it running, "
        "and does a firewall let this port pass?"
    )


def _meet(seat: Seat, deadline_s: float) -> tuple[Store, list[str]]:
    ends = time.monotonic() + deadline_s
    store = _connect(seat, deadline_s)
    attempt = _call if seat.owner.leads else _answer
    try:
        name, roster = attempt(store, seat.owner, lambda: time.monotonic() < ends)
    except (RuntimeError, ValueError, TypeError) as error:  # gone, or it has words of a stranger
        raise RankLost(
            f"{seat.says} lost the store at {seat.address}:{seat.port}, and with it rank 0 or "
            f"the launcher on its host: {plain_text(error)}"
        ) from error
    hosts = {rank: host for rank, (_, host) in sorted(roster.items())}
    if missing := sorted(set(range(seat.owner.size)) - set(hosts)):
        came = [f"rank {rank} on {host}" for rank, host in hosts.items()]
        raise RankLost(
            f"{seat.says} waited {deadline_s:g} s for others at {seat.address}:{seat.port}: "
            f"{len(missing)} of {seat.owner.size} ranks did not come: "
            f"{', '.join(map(str, missing))}.\n  Came: {', '.join(came)}.\n  Is the command "
            "running on every host, each with its own ranks?"
        )
    return PrefixStore(name, store), list(hosts.values())


def is_loopback(address: str) -> bool:
    """Return whether an address, as it is written, is reached from this host only.

    Names are not resolved: on its own host, a host's name often means 127.0.1.1.
    """
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return address == "localhost"


def serve(address: str, port: int, deadline_s: float) -> Store:
    """Return a store of this process; port 0 is any free one. Raises OSError or RuntimeError.

    At a loopback address it listens there and nowhere else. At any other it listens on all
    interfaces, because torch does and the address may be a name that only others resolve.
    """
    listener = _listener(address, port) if is_loopback(address) else None
    port = port if listener is None else listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=deadline_s),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listener(address: str, port: int) -> socket.socket:
    address = LOOPBACK if address == "localhost" else address
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
    except OSError:
        listener.close()
        raise
    return listener


def _connect(seat: Seat, deadline_s: float) -> Store:
    """Return the store that all attempts share."""
    if seat.owner.leads and not seat.agent:
        try:
            return serve(seat.address, seat.port, deadline_s)
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"{seat.says} cannot listen on port {seat.port} of {seat.address}: "
                f"{plain_text(error)}\n  Give another MASTER_PORT (torchrun --master-port), or "
                "end what uses this one."
            ) from error
    return reach(seat, deadline_s)


def reach(seat: Seat, deadline_s: float) -> Store:
    """Return a connection to the store of another process. Raises RankLost."""
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            seat.address,
            seat.port,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise _no_answer(seat, deadline_s, error) from error


def _call(store: Store, owner: Owner, in_time: Callable[[], bool]) -> tuple[str, Roster]:
    """Name an attempt as rank 0, and wait until all ranks have answered."""
    name = uuid.uuid4().hex
    roster: Roster = {0: ("", socket.gethostname())}
    store.set("attempt", name)
    while len(roster) < owner.size and in_time():
        missing = set(range(owner.size)) - set(roster)
        came = {rank for rank in missing if store.check([f"{name}/here/{rank}"])}
        for rank in came:
            roster[rank] = json.loads(store.get(f"{name}/here/{rank}"))
        if came:
            store.set(f"{name}/roster", json.dumps(list(roster.items())))
        time.sleep(_POLL_S)
    return name, roster


def _answer(store: Store, owner: Owner, in_time: Callable[[], bool]) -> tuple[str, Roster]:
    """Answer the call of rank 0 as another rank, until the roster has all ranks."""
    own, name = [uuid.uuid4().hex, socket.gethostname()], ""
    roster: Roster = {owner.rank: own}
    while len(roster) < owner.size and in_time():
        called = store.get("attempt").decode() if store.check(["attempt"]) else ""
        if called != name:
            name = called
            store.set(f"{name}/here/{owner.rank}", json.dumps(own))
        if name and store.check([f"{name}/roster"]):
            heard: Roster = dict(json.loads(store.get(f"{name}/roster")))
            roster = heard if heard.get(owner.rank) == own else roster
        time.sleep(_POLL_S)
    return name, roster


def choose_interface(seat: Seat) -> None:
    """Let gloo use the interface that reaches where ranks meet, unless the user chose one.

    By itself it takes the one that this host's name resolves to, which is often the loopback.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return
    family, kind, _, _, target = socket.getaddrinfo(
        seat.address, seat.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # nothing is sent: it only finds the route
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address_of(probe, name) == own:
                os.environ["GLOO_SOCKET_IFNAME"] = name


def _address_of(probe: socket.socket, interface: str) -> str | None:
    """Return an interface's IPv4 address."""
    with suppress(OSError):
        asked = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    return None
