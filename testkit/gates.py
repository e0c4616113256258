"""A gate on the loopback, and a wire before it that can change what goes through."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from megatrain.rewards.inside_vllm.gate import Gate

KEY = "a secret that is long enough for a gate"


@contextmanager
def gate_before(server: str, secret: str = KEY) -> Iterator[str]:
    """Yield the address of a gate before a server."""
    with Gate(("127.0.0.1", 0), server, secret.encode()) as gate:
        thread = threading.Thread(target=gate.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{gate.server_address[1]}"
        finally:
            gate.shutdown()
            thread.join()


@dataclass(slots=True, kw_only=True)
class Wire:
    """What goes over the connections of a gate."""

    address: str = ""
    change: Callable[[int, bytes], bytes | None] = lambda first, data: data
    """Gets bytes to the gate and the number of the first of them; None cuts the connection."""
    change_back: Callable[[int, bytes], bytes | None] = lambda first, data: data
    """The same of bytes from the gate."""
    sent: list[bytes] = field(default_factory=list)
    """All bytes to the gate, by connection."""


@contextmanager
def wire_to(gate: str) -> Iterator[Wire]:
    """Yield a wire that leads to a gate."""
    host, _, port = gate.removeprefix("tcp://").rpartition(":")
    wire = Wire()
    with socket.create_server(("127.0.0.1", 0)) as listens:
        wire.address = f"tcp://127.0.0.1:{listens.getsockname()[1]}"

        def accept() -> None:
            with suppress(OSError):
                while True:
                    near, _ = listens.accept()
                    far = socket.create_connection((host, int(port)))
                    given = len(wire.sent), near, far
                    wire.sent.append(b"")
                    threading.Thread(target=there, args=given, daemon=True).start()
                    threading.Thread(target=back, args=(far, near), daemon=True).start()

        def there(number: int, near: socket.socket, far: socket.socket) -> None:
            def note(first: int, data: bytes) -> bytes | None:
                wire.sent[number] += data
                return wire.change(first, data)

            _led(near, far, note)

        def back(far: socket.socket, near: socket.socket) -> None:
            _led(far, near, lambda first, data: wire.change_back(first, data))

        threading.Thread(target=accept, daemon=True).start()
        yield wire
        listens.shutdown(socket.SHUT_RDWR)


def _led(
    source: socket.socket, target: socket.socket, change: Callable[[int, bytes], bytes | None]
) -> None:
    count = 0
    with suppress(OSError):
        while data := source.recv(65536):
            changed = change(count, data)
            count += len(data)
            if changed is None:
                break
            target.sendall(changed)
    for one in (source, target):
        with suppress(OSError):  # the other direction may have done it
            one.shutdown(socket.SHUT_RDWR)
        one.close()


def flipped(at: int) -> Callable[[int, bytes], bytes]:
    """Return what changes one bit of the byte with this number."""

    def change(first: int, data: bytes) -> bytes:
        if first <= at < first + len(data):
            return data[: at - first] + bytes([data[at - first] ^ 4]) + data[at - first + 1 :]
        return data

    return change
