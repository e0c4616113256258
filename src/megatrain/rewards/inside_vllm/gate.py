"""A gate beside a vLLM server on another host: weights by blocks over TCP, for those with a secret.

    MEGATRAIN_GATE_SECRET=... python gate.py LISTEN_HOST:PORT http://127.0.0.1:8000

vLLM itself listens on the loopback of its host: who reaches it can change its weights. The gate
passes on what a trainer asks of it, and keeps the weights that the trainer sends in memory of its
own, where the worker finds them as if the trainer were on this host (megatrain_weights.py). Needs
Python alone.

    hello     each side: mark, 32 random bytes. Of those and the secret both make a key for each
              direction, and show that they have them: the trainer first
    frame     length, bytes, HMAC-SHA256 of the key over the frame's number, length and bytes
    calls     a frame of JSON {"call": ...}; bytes follow in a frame of their own

Whoever has not the secret gets 40 bytes that say nothing, and is let go: after a while, or when so
many others come that it is the first of too many. A frame that was changed,
left out, repeated or sent in another connection ends the connection before anything is done with
it. Frames are not encrypted: where others can listen, lead them through a tunnel.

Laws (tests/rewards/inside_vllm/test_gate.py)
    1. Without the secret nothing is asked of the server, and no memory is taken.
    2. A bit that changes anywhere on the way is noticed by the side that receives it.
    3. What one connection has said is worth nothing in another.
    4. Strangers that say nothing, or little, keep nobody out who has the secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import mmap
import os
import secrets
import socket
import socketserver
import struct
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

SECRET = "MEGATRAIN_GATE_SECRET"
LEAST_SECRET = 32
MARK = b"MEGAGAT1"
_LENGTH = struct.Struct("<Q")
_COUNTED = struct.Struct("<QQ")
_NONCE_BYTES = 32
_SEAL_BYTES = 32
_HELLO_S = 20.0
_CONNECTIONS = 1024
_STRANGERS = 32
_GONE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""A trainer whose host is gone keeps its memory for two minutes; by default it would be hours."""
CALL_BYTES = 1 << 26
"""Most bytes of a call."""
BLOCK_BYTES = 1 << 24
"""Most bytes of weights in a frame."""
REPLY_BYTES = 1 << 28
PATHS = frozenset(
    "v1/models v1/completions health pause resume reset_prefix_cache collective_rpc".split()  # noqa: SIM905
)
"""What of the server is passed on."""


class GateError(Exception):
    """The other side does not have the secret, or what it sent was changed on its way."""


def secret_of(text: str | None) -> bytes:
    """Return the secret of the environment as bytes. Raises GateError for one that can be found."""
    if text is None or len(text) < LEAST_SECRET:
        raise GateError(
            f"{SECRET} has no secret of {LEAST_SECRET} characters or more. Make one with `openssl "
            "rand -hex 32`, and set it for the gate and for the run"
        )
    return text.encode()


class Channel:
    """Frames in both directions of a connection, each sealed by a key that the other side has."""

    def __init__(self, connection: socket.socket, secret: bytes, *, accepts: bool) -> None:
        """Say hello. Raises GateError, or OSError.

        The side that connects shows first that it has the secret, and sends nothing else before the
        other has.
        """
        self._connection = connection
        own = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(MARK + own)
        hello = self._read(len(MARK) + _NONCE_BYTES)
        if not hello.startswith(MARK):
            raise GateError("the other side is no gate, or not of this version")
        other = bytes(hello[len(MARK) :])
        both = other + own if accepts else own + other
        sides = (b"accepts", b"connects") if accepts else (b"connects", b"accepts")
        self._sends, self._receives = (
            hmac.new(hmac.digest(secret, side + both, "sha256"), digestmod=hashlib.sha256)
            for side in sides
        )
        self._num_sent = self._num_received = 0
        if not accepts:
            self.send(b"")
        self.receive(0)
        if accepts:
            self.send(b"")

    def send(self, data: bytes | memoryview) -> None:
        """Send a frame."""
        seal = _seal(self._sends, self._num_sent, data)
        self._num_sent += 1
        self._connection.sendall(_LENGTH.pack(len(data)))
        self._connection.sendall(data)
        self._connection.sendall(seal)

    def receive(self, most_bytes: int) -> bytearray:
        """Return the next frame. Raises GateError, EOFError if there is none, or OSError."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > most_bytes:
            raise GateError(f"a frame of {length:,} bytes, {most_bytes:,} at most are allowed")
        data = self._read(length)
        seal = _seal(self._receives, self._num_received, data)
        if not hmac.compare_digest(seal, bytes(self._read(_SEAL_BYTES))):
            raise GateError(
                "the other side does not have the secret, or what it sent was changed on its way"
            )
        self._num_received += 1
        return data

    def close(self) -> None:
        self._connection.close()

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, done = memoryview(data), 0
        while done < count:
            got = self._connection.recv_into(view[done:])
            if not got:
                raise EOFError("the connection was closed")
            done += got
        return data


def _seal(key: hmac.HMAC, number: int, data: bytes | bytearray | memoryview) -> bytes:
    made = key.copy()
    made.update(_COUNTED.pack(number, len(data)))
    made.update(data)
    return made.digest()


class _Memory:
    """Weights that a trainer sends, where a process of this host finds them."""

    def __init__(self, num_bytes: int) -> None:
        if num_bytes > _free_bytes():
            raise ValueError(f"{num_bytes:,} bytes of weights, {_free_bytes():,} are free here")
        self._fd = os.memfd_create("megatrain-weights")
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)
            self._map = mmap.mmap(self._fd, num_bytes)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def address(self) -> dict[str, int]:
        return {"process": os.getpid(), "descriptor": self._fd}

    def put(self, start: int, data: bytearray) -> None:
        if not 0 <= start <= start + len(data) <= len(self._map):
            raise ValueError("a block outside of the memory")
        self._map[start : start + len(data)] = data

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


def _free_bytes() -> int:
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["MemAvailable"].split()[0]) << 10


class Gate(socketserver.ThreadingTCPServer):
    """Listens, and serves each connection in a thread."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], server: str, secret: bytes) -> None:
        """`server`: the address of vLLM, http://127.0.0.1:8000."""
        found = urllib.parse.urlsplit(server)
        assert found.hostname is not None
        self.vllm = found.hostname, found.port or 80
        self.secret = secret
        self.strangers = _Strangers()
        self.connections = threading.BoundedSemaphore(_CONNECTIONS)
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        print(f"gate: {client_address}: {sys.exc_info()[1]!r}", file=sys.stderr, flush=True)


class _Handler(socketserver.BaseRequestHandler):
    server: Gate
    request: socket.socket

    def handle(self) -> None:
        with _taken(self.server.connections):
            with self.server.strangers.joined(self.request):
                self.request.settimeout(_HELLO_S)
                try:
                    channel = Channel(self.request, self.server.secret, accepts=True)
                except EOFError:
                    return
            self.request.settimeout(None)
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _GONE.items():
                self.request.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.ExitStack() as held, contextlib.suppress(EOFError):
                self._serve(channel, held)

    def _serve(self, channel: Channel, held: contextlib.ExitStack) -> None:
        memory: _Memory | None = None
        while True:
            call = json.loads(channel.receive(CALL_BYTES))
            name = call["call"]
            if name == "put":
                if memory is None:
                    raise ValueError("a block before its memory")
                memory.put(int(call["start"]), channel.receive(BLOCK_BYTES))
                continue
            try:
                if name == "ask":
                    found, body = self._ask(call)
                elif name == "memory" and memory is None:
                    memory = held.enter_context(contextlib.closing(_Memory(int(call["num_bytes"]))))
                    found, body = memory.address, b""
                elif name == "wait":  # for all blocks before it
                    found, body = {}, b""
                else:
                    raise ValueError(f"{name!s:.40} is no call")
            except (OSError, ValueError, http.client.HTTPException) as error:
                found, body = {"error": str(error)[:500]}, b""
            channel.send(json.dumps(found).encode())
            channel.send(body)

    def _ask(self, call: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the status and the answer of the server."""
        path, request = str(call["path"]), call["request"]
        if path.partition("?")[0] not in PATHS:
            raise ValueError(f"{path[:80]} is not passed on")
        connection = http.client.HTTPConnection(*self.server.vllm, timeout=float(call["timeout"]))
        with contextlib.closing(connection):
            if request is None:
                connection.request("GET", f"/{path}")
            else:
                headers = {"Content-Type": "application/json"}
                connection.request("POST", f"/{path}", json.dumps(request).encode(), headers)
            answer = connection.getresponse()
            body = answer.read(REPLY_BYTES + 1)
            if len(body) > REPLY_BYTES:
                raise ValueError(f"the server sent more than {REPLY_BYTES:,} bytes")
            return {"status": answer.status}, body


class _Strangers:
    """Connections whose other side has not shown the secret yet."""

    def __init__(self) -> None:
        self._waiting: dict[int, socket.socket] = {}  # the first came first
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def joined(self, connection: socket.socket) -> Iterator[None]:
        """Count a connection; of too many the first is let go."""
        with self._lock:
            if len(self._waiting) >= _STRANGERS:
                with contextlib.suppress(OSError):
                    self._waiting.pop(next(iter(self._waiting))).shutdown(socket.SHUT_RDWR)
            self._waiting[id(connection)] = connection
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(id(connection), None)


@contextlib.contextmanager
def _taken(few: threading.BoundedSemaphore) -> Iterator[None]:
    """Take a place, or refuse the connection."""
    if not few.acquire(blocking=False):
        raise ConnectionRefusedError("too many connections")
    try:
        yield
    finally:
        few.release()


def main() -> None:
    """Serve until it is ended."""
    if len(sys.argv) != 3:
        sys.exit(f"{SECRET}=... python gate.py LISTEN_HOST:PORT http://127.0.0.1:8000")
    host, _, port = sys.argv[1].rpartition(":")
    if not host or not port.isdigit():
        sys.exit(f"{sys.argv[1]}: give the address to listen at, like 10.0.0.2:7000")
    try:
        secret = secret_of(os.environ.get(SECRET))
    except GateError as error:
        sys.exit(str(error))
    with Gate((host, int(port)), sys.argv[2], secret) as gate:
        gate.serve_forever()


if __name__ == "__main__":
    main()
