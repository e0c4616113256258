"""Hosts as network namespaces, and the network between them as a process that can spoil it.

Each host has a network namespace with one TAP device. A process of its own, the switch, holds the
other ends: it passes frames on, drops those of a pair of hosts that is cut, and holds back those of
a host that is delayed. So nothing is needed but namespaces and TAP; no frame is passed in a wrong
order, and nothing stays behind: a namespace ends with the last process that has it open.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
PR_SET_PDEATHSIG, SIGKILL = 1, 9
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MOST_BYTES = 1 << 16
INTERFACE = "net0"
SETUP = """link set lo up
link set {interface} address 02:00:00:00:00:{host:02x}
address add {address}/24 dev {interface}
link set {interface} up
"""
_LIBC = ctypes.CDLL(None, use_errno=True)


def address_of(host: int) -> str:
    return f"10.77.0.{host + 1}"


def can_make_hosts() -> str | None:
    """Return why hosts cannot be made here; None if they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are of Linux"
    tried = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x44000000) != 0)"
    try:
        with Path("/dev/net/tun").open("rb"):
            subprocess.run([sys.executable, "-I", "-S", "-c", tried], check=True)
            subprocess.run(["ip", "-V"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces, /dev/net/tun and ip are needed: {error}"
    return None


class Hosts:
    """Some hosts on one network; use it in a `with` block. Only a lone thread may make it."""

    def __init__(self, num_hosts: int) -> None:
        ready, told = os.pipe()
        commands, self._commands = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(ready)
            os.close(self._commands)
            try:
                _Switch(num_hosts, commands).run(told)
            finally:
                os._exit(1)
        os.close(told)
        os.close(commands)
        with os.fdopen(ready) as lines:
            self._namespaces = json.loads(lines.readline() or "null")
        if self._namespaces is None:
            raise OSError("the switch could not make its hosts")

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._commands)
        os.waitpid(self.pid, 0)

    def enter(self, host: int) -> None:
        """Let this process, a child, be on a host."""
        with Path(f"/proc/{self.pid}/fd/{self._namespaces[host]}").open("rb") as namespace:
            _must(_LIBC.setns(namespace.fileno(), CLONE_NEWNET))
        _must(_LIBC.unshare(CLONE_NEWUTS))
        socket.sethostname(f"host{host}")

    def cut(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Drop all frames from the first to the second host of each pair, from now on."""
        self._say({"cut": list(pairs)})

    def delay(self, host: int, seconds: float) -> None:
        """Hold back all frames from and to a host, from now on."""
        self._say({"host": host, "delay_s": seconds})

    def heal(self) -> None:
        """Undo all."""
        self._say({})

    def _say(self, command: object) -> None:
        os.write(self._commands, json.dumps(command).encode() + b"\n")


class _Switch:
    def __init__(self, num_hosts: int, commands: int) -> None:
        self._commands, self._rest = commands, b""
        _must(_LIBC.prctl(PR_SET_PDEATHSIG, SIGKILL))
        made = [_make_host(host) for host in range(num_hosts)]
        self._taps, self._namespaces = [tap for tap, _ in made], [net for _, net in made]
        self._cut: set[tuple[int, int]] = set()
        self._delays: dict[int, float] = {}
        self._held: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()
        self._last: dict[tuple[int, int], float] = {}

    def run(self, told: int) -> None:
        """Pass frames on until the commands end."""
        os.write(told, json.dumps(self._namespaces).encode() + b"\n")
        os.close(told)
        while True:
            left = max(0.0, self._held[0][0] - time.monotonic()) if self._held else None
            ready = select.select([self._commands, *self._taps], [], [], left)[0]
            if self._commands in ready and not self._obey():
                os._exit(0)
            for source, tap in enumerate(self._taps):
                if tap in ready:
                    self._take(source, os.read(tap, MOST_BYTES))
            while self._held and self._held[0][0] <= time.monotonic():
                _, _, target, frame = heapq.heappop(self._held)
                os.write(self._taps[target], frame)

    def _take(self, source: int, frame: bytes) -> None:
        is_for_all = frame[0] & 1
        others = set(range(len(self._taps))) - {source}
        for target in others if is_for_all else others & {frame[5]}:
            pair = source, target
            if pair not in self._cut:
                delay_s = max(self._delays.get(source, 0.0), self._delays.get(target, 0.0))
                due = max(time.monotonic() + delay_s, self._last.get(pair, 0.0))
                self._last[pair] = due
                heapq.heappush(self._held, (due, next(self._order), target, frame))

    def _obey(self) -> bool:
        data = os.read(self._commands, 4096)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if not command:
                self._cut, self._delays = set(), {}
                self._last.clear()
            elif "cut" in command:
                self._cut |= {(a, b) for a, b in command["cut"]}
            else:
                self._delays[command["host"]] = command["delay_s"]
        return bool(data)


def _make_host(host: int) -> tuple[int, int]:
    """Move into a new namespace; return the end of its TAP device, and the namespace, as files."""
    _must(_LIBC.unshare(CLONE_NEWNET))
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), IFF_TAP | IFF_NO_PI))
    lines = SETUP.format(interface=INTERFACE, host=host, address=address_of(host))
    subprocess.run(["ip", "-batch", "-"], input=lines, text=True, check=True)
    return tap, os.open("/proc/self/ns/net", os.O_RDONLY)


def end_with_parent() -> None:
    """Let the system kill this process, a child, when its parent dies."""
    _must(_LIBC.prctl(PR_SET_PDEATHSIG, SIGKILL))


def _must(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
