"""Laws of gate.py: nothing for those without the secret, and no bit that changed on its way."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import ConfigError, GeneratorError
from megatrain.rewards import far_server
from megatrain.rewards.far_server import GateClient, called
from megatrain.rewards.inside_vllm import gate as gate_file
from megatrain.rewards.inside_vllm.gate import MARK, SECRET, Channel, GateError, secret_of
from testkit.gates import KEY, Wire, flipped, gate_before, wire_to
from testkit.listening import listening
from testkit.patience import eventually

HELLO_BYTES = len(MARK) + 32
ASKED: dict[str, Any] = {"path": "v1/models", "request": None, "timeout_s": 2, "most_bytes": 99}


class World:
    """A server that notes what is asked of it, a gate before it, and a wire to that."""

    def __init__(self, calls: list[str], gate: str, wire: Wire) -> None:
        self.calls, self.gate, self.wire = calls, gate, wire

    @property
    def client(self) -> GateClient:
        return GateClient(self.wire.address)

    def bytes_of_a_call(self) -> tuple[int, int]:
        """Return how many bytes a call takes, there and back."""
        back = 0

        def count(first: int, data: bytes) -> bytes:
            nonlocal back
            back = first + len(data)
            return data

        self.wire.change_back = count
        assert self.client.asked(**ASKED) == {"asked": "/v1/models"}
        return len(self.wire.sent[-1]), back


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    calls: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            calls.append(self.path)
            body = json.dumps({"asked": self.path}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setenv(SECRET, KEY)
    monkeypatch.setattr(far_server, "_BEHIND_S", 0)
    with listening(Handler) as server, gate_before(server) as gate, wire_to(gate) as wire:
        yield World(calls, gate, wire)


def test_every_bit_on_the_way_counts(world: World) -> None:
    there, back = world.bytes_of_a_call()
    assert len(world.calls) == 1
    marks = {0, 9, HELLO_BYTES - 1, HELLO_BYTES, HELLO_BYTES + 8, HELLO_BYTES + 39}
    for at in sorted(marks | {HELLO_BYTES + 40, there - 33, there - 1}):
        world.wire.change = flipped(at)
        with pytest.raises(GeneratorError, match="does not answer"):
            world.client.asked(**ASKED)
    assert len(world.calls) == 1, "the gate asks nothing for a call that was changed"
    world.wire.change = lambda first, data: data
    for at in sorted(marks | {back - 33, back - 1}):
        world.wire.change_back = flipped(at)
        with pytest.raises(GeneratorError, match="does not answer"):
            world.client.asked(**ASKED)


def test_without_the_secret_nothing_happens(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(gate_file, "_Memory", lambda num_bytes: taken.append(num_bytes))
    monkeypatch.setenv(SECRET, KEY.upper())
    with pytest.raises(GeneratorError, match="has it the same secret"):
        world.client.asked(**ASKED)
    with pytest.raises(GateError, match="has it the same secret"):
        world.client.open(10)
    assert (world.calls, taken) == ([], [])
    assert all(len(sent) == HELLO_BYTES + 40 for sent in world.wire.sent), "no call was sent"


def test_strangers_that_say_little_keep_nobody_out(world: World) -> None:
    host, _, port = world.gate.removeprefix("tcp://").rpartition(":")
    with ExitStack() as strangers:
        for _ in range(gate_file._STRANGERS + 1):
            one = strangers.enter_context(socket.create_connection((host, int(port)), timeout=10))
            one.sendall(MARK[:1])
            one.recv(1)
        assert world.client.asked(**ASKED) == {"asked": "/v1/models"}


def test_a_trainer_sends_nothing_to_a_gate_without_the_secret(world: World) -> None:
    with gate_before("http://127.0.0.1:1", KEY.upper()) as other, wire_to(other) as wire:
        with pytest.raises(GeneratorError, match="has it the same secret"):
            GateClient(wire.address).asked(**ASKED)
        assert [len(sent) for sent in wire.sent] == [HELLO_BYTES + 40]


def test_what_was_said_once_is_worth_nothing_again(world: World) -> None:
    world.bytes_of_a_call()
    host, _, port = world.gate.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as again:
        again.sendall(world.wire.sent[0])
        found = b""
        while data := again.recv(4096):
            found += data
    assert len(found) == HELLO_BYTES
    assert len(world.calls) == 1


def test_frames_of_a_connection_are_numbered(world: World) -> None:
    with closing(world.client.open(10)) as channel:
        call = json.dumps({"call": "wait"}).encode()
        seal = gate_file._seal(channel._sends, channel._num_sent, call)
        frame = len(call).to_bytes(8, "little") + call + seal
        channel._connection.sendall(frame + frame)
        assert json.loads(channel.receive(99)) == {}
        assert channel.receive(0) == b""
        with pytest.raises((EOFError, ConnectionError)):
            channel.receive(99)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"call": "ask", "path": "docs", "request": None, "timeout": 1}, "docs is not passed on"),
        ({"call": "memory", "num_bytes": 1 << 60}, "bytes of weights, .* are free here"),
        ({"call": "else"}, "else is no call"),
    ],
)
def test_what_a_gate_does_not_do_is_said(world: World, call: Any, said: str) -> None:
    with closing(world.client.open(10)) as channel, pytest.raises(GateError, match=said):
        called(channel, call)
    assert world.calls == []


def test_blocks_arrive_where_they_belong(world: World) -> None:
    def put(channel: Channel, start: int, data: bytes) -> None:
        channel.send(json.dumps({"call": "put", "start": start}).encode())
        channel.send(data)

    with closing(world.client.open(10)) as channel:
        there, _ = called(channel, {"call": "memory", "num_bytes": 100})
        put(channel, 0, b"a" * 100)
        put(channel, 10, b"bc")
        put(channel, 98, b"de")
        called(channel, {"call": "wait"})
        path = Path(f"/proc/{there['process']}/fd/{there['descriptor']}")
        assert path.read_bytes() == b"a" * 10 + b"bc" + b"a" * 86 + b"de"
        put(channel, 99, b"fg")
        with pytest.raises((EOFError, ConnectionError)):
            called(channel, {"call": "wait"})


def test_it_wants_a_secret_and_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for few in (None, "short"):
        with pytest.raises(GateError, match="no secret of 32 characters or more"):
            secret_of(few)
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(ConfigError, match=r"openssl\s+rand -hex 32"):
        GateClient("tcp://127.0.0.1:7000")
    words = [sys.executable, gate_file.__file__]
    for given, said in ((["127.0.0.1:0"], "LISTEN_HOST"), ([":0", "http://x"], "to listen at")):
        ended = subprocess.run(
            [*words, *given], env={**os.environ, SECRET: KEY}, capture_output=True, check=False
        )
        assert ended.returncode == 1
        assert said in ended.stderr.decode()


def test_the_other_side_must_be_a_gate() -> None:
    near, far = socket.socketpair()
    far.sendall(b"HTTP/1.1 400 Bad Request" + b" " * 40)
    with near, far, pytest.raises(GateError, match="is no gate"):
        Channel(near, KEY.encode(), accepts=False)


def test_a_trainer_whose_host_is_gone_does_not_keep_its_memory_for_hours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SECRET, KEY)
    with gate_before("http://127.0.0.1:9") as gate:
        channel = GateClient(gate).open(2.0)
        called(channel, {"call": "memory", "num_bytes": 1 << 20})
        port = f":{int(gate.rpartition(':')[2]):04X}"

        def seconds_to_a_sign() -> float | None:
            """Return when the gate's system asks whether the other side lives."""
            lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
            (timer,) = [one[5] for one in lines if one[1].endswith(port) and one[3] == "01"]
            kind, ticks = timer.split(":")
            return int(ticks, 16) / os.sysconf("SC_CLK_TCK") if kind == "02" else None

        eventually(lambda: seconds_to_a_sign() is not None)
        found = seconds_to_a_sign()
        channel.close()
    assert found is not None
    assert found <= 60


def test_a_side_that_sends_back_what_it_hears_is_no_gate() -> None:
    """It has not the secret: each direction has a key of its own."""
    ours, theirs = socket.socketpair()

    def echo() -> None:
        with suppress(OSError):
            while data := theirs.recv(1 << 16):
                theirs.sendall(data)

    thread = threading.Thread(target=echo)
    thread.start()
    try:
        with pytest.raises(GateError, match="does not have the secret"):
            Channel(ours, b"s" * 32, accepts=False)
    finally:
        ours.close()
        thread.join()
        theirs.close()
