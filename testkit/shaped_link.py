"""Links of a given rate and delay, between network namespaces of their own.

    with shaped_links(2, rate_mbit=20, round_trip_s=0.05) as links:
        subprocess.Popen([*links[0].there, "curl", f"http://{links[0].hub}:8000/"])

Each link joins a namespace to one that all links share, the hub. Both ends are TUN devices: packets
are those of the kernel's TCP, and are let out by the kernel's token bucket (tc tbf). A process
carries each from one end to the other after half of the round trip, since few kernels have netem.
Needs root, /dev/net/tun, ip and tc. `measured` says what a link really is.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import secrets
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_TUNSETIFF, _TUN_WITHOUT_HEAD = 0x400454CA, 0x0001 | 0x1000
_NEW_NETWORK = 0x40000000
_MOST_BYTES = 1 << 16
_TRIPS = 5
"""Connections of which the fastest says how long a round trip takes: others wait for a CPU."""
_QUEUE_MS = 100
"""Longest that a packet waits for its turn; one that would wait longer is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedLink:
    """A link from a namespace to the hub."""

    namespace: str
    hub_namespace: str
    hub: str
    """Address of the hub, as this end sees it."""

    @property
    def there(self) -> list[str]:
        """Words before a command that is to run at this end."""
        return ["ip", "netns", "exec", self.namespace]

    @property
    def at_hub(self) -> list[str]:
        """Words before a command that is to run at the hub."""
        return ["ip", "netns", "exec", self.hub_namespace]

    def measured(self, num_bytes: int = 4 << 20) -> dict[str, float]:
        """Return the Mbit/s of a transfer each way, and the ms of a round trip."""
        listening = [*self.at_hub, sys.executable, "-m", __name__, "listen", str(num_bytes)]
        with subprocess.Popen(listening, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            asking = [*self.there, sys.executable, "-m", __name__, "ask", self.hub, port]
            asked = [*asking, str(num_bytes)]
            done = subprocess.run(asked, capture_output=True, text=True, cwd=ROOT, check=True)
        found: dict[str, float] = json.loads(done.stdout)
        return found


def missing() -> str | None:
    """Return what this machine lacks for shaped links."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun is missing"
    found = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(found)} of iproute2 is missing" if found else None


@contextmanager
def shaped_links(
    count: int, *, rate_mbit: float, round_trip_s: float
) -> Iterator[list[ShapedLink]]:
    """Yield links of so many Mbit/s each way."""
    mark = secrets.token_hex(3)
    hub, names = f"{mark}-hub", [f"{mark}-{number}" for number in range(count)]
    with ExitStack() as stack:
        for name in (hub, *names):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        carrying = [sys.executable, "-m", __name__, "carry", str(round_trip_s / 2), hub, *names]
        carrier = stack.enter_context(
            subprocess.Popen(
                carrying, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
        )
        stack.callback(carrier.terminate)
        assert carrier.stdout is not None
        assert carrier.stdout.readline() == "ready\n", "the carrier has not begun"
        links = []
        for number, name in enumerate(names):
            here, there = f"10.{77 + number}.0.1", f"10.{77 + number}.0.2"
            for space, device, own, other in (
                (hub, f"tun{number}", here, there),
                (name, "tun0", there, here),
            ):
                _run("ip", "-n", space, "addr", "add", own, "peer", other, "dev", device)
                _run("ip", "-n", space, "link", "set", device, "up")
                rate = f"rate {rate_mbit}mbit burst 16kb latency {_QUEUE_MS}ms"
                _run("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *rate.split())
            links.append(ShapedLink(namespace=name, hub_namespace=hub, hub=here))
        yield links


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


def _carry(delay_s: float, hub: str, names: Sequence[str]) -> None:
    """Carry packets between pairs of TUN devices, each after a delay, until the input ends."""
    os.nice(-20)  # on a busy machine, too, a link has its delay
    other: dict[int, int] = {}
    for number, name in enumerate(names):
        ends = _tun(hub, f"tun{number}"), _tun(name, "tun0")
        other |= {ends[0]: ends[1], ends[1]: ends[0]}
    print("ready", flush=True)
    under_way: deque[tuple[float, int, bytes]] = deque()
    poll = select.poll()
    for end in (*other, sys.stdin.fileno()):
        poll.register(end, select.POLLIN)
    while True:
        wait_ms = None
        if under_way:
            wait_ms = max(0.0, 1000 * (under_way[0][0] - time.monotonic()))
        for end, _ in poll.poll(wait_ms):
            if end not in other:
                return
            due = time.monotonic() + delay_s
            while (packet := _read(end)) is not None:
                under_way.append((due, other[end], packet))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, end, packet = under_way.popleft()
            try:
                os.write(end, packet)
            except OSError:  # a device that is not up yet: lost, as on any link
                continue


def _read(end: int) -> bytes | None:
    try:
        return os.read(end, _MOST_BYTES)
    except (BlockingIOError, OSError):
        return None


def _tun(namespace: str, device: str) -> int:
    """Return an end of a new TUN device in a namespace; this process stays in that namespace."""
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(there, _NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), f"setns to {namespace} has failed")
    os.close(there)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TUN_WITHOUT_HEAD))
    return end


def _listen(num_bytes: int) -> None:
    """Take bytes from one connection, answer, and send as many."""
    with socket.create_server(("", 0)) as server:
        print(server.getsockname()[1], flush=True)
        for _ in range(_TRIPS):
            server.accept()[0].close()
        connection, _ = server.accept()
        with connection:
            _take(connection, num_bytes)
            connection.sendall(bytes(1 + num_bytes))


def _ask(host: str, port: int, num_bytes: int) -> dict[str, float]:
    trips = []
    for _ in range(_TRIPS):
        began = time.monotonic()
        socket.create_connection((host, port)).close()
        trips.append(time.monotonic() - began)
    with socket.create_connection((host, port)) as connection:
        began = time.monotonic()
        connection.sendall(bytes(num_bytes))
        _take(connection, 1)
        sent = time.monotonic()
        _take(connection, num_bytes)
        taken = time.monotonic()
    bits = 8e-6 * num_bytes
    return {
        "up_mbit": bits / (sent - began - min(trips)),
        "down_mbit": bits / (taken - sent),
        "round_trip_ms": 1000 * min(trips),
    }


def _take(connection: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        found = len(connection.recv(min(num_bytes, 1 << 16)))
        assert found, "the other end has closed"
        num_bytes -= found


def main(words: Sequence[str]) -> Any:
    match words:
        case ["carry", delay_s, hub, *names]:
            _carry(float(delay_s), hub, names)
        case ["listen", num_bytes]:
            _listen(int(num_bytes))
        case ["ask", host, port, num_bytes]:
            print(json.dumps(_ask(host, int(port), int(num_bytes))))


if __name__ == "__main__":
    main(sys.argv[1:])
