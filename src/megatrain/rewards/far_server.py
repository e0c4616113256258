"""A vLLM server on another host, reached through the gate beside it: weights by blocks over TCP.

    rollouts: {engine: vllm, server: tcp://10.0.0.2:7000}       MEGATRAIN_GATE_SECRET in both places

inside_vllm/gate.py runs on that host and says how both sides know each other. Each request has a
connection of its own. Weights have one that stays: the memory that they arrive in lives as long as
it. If it has broken, another one is made, and all of them are sent again.

All else is as on one host: the weights are loaded in one call, their digests are those of our own
store, and the worker is asked which weights it has before and after each draw.

Laws (tests/rewards/test_far_server.py; against vLLM itself: proofs/rollouts.py --far)
    1. Answers are those of the weights of the last update, as on one host.
    2. A connection that breaks in an update leaves no answers, and the next update is whole.
    3. Nothing is sent to a gate that does not have the secret.
"""

from __future__ import annotations

import json
import os
import socket
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.config.value_types import is_gate
from megatrain.disk.hf.weights_file import NamedTensor
from megatrain.errors import ConfigError, GeneratorError
from megatrain.memory.direct import as_memory
from megatrain.rewards.completions import CompletionsServer, answered
from megatrain.rewards.inside_vllm.gate import (
    BLOCK_BYTES,
    REPLY_BYTES,
    SECRET,
    Channel,
    GateError,
    secret_of,
)
from megatrain.rewards.shared_weights import WeightsCopy
from megatrain.rewards.vllm_server import VllmServer

_CONNECT_S = 30.0
_BEHIND_S = 30.0
"""How much later than the server an answer of the gate may be."""


class GateClient:
    """An address at which a gate listens."""

    def __init__(self, address: str) -> None:
        """Raises ConfigError for what is no address of a gate, and without a secret."""
        if not is_gate(address):
            raise ConfigError(f"{address} is no address of a gate: tcp://10.0.0.2:7000 is one")
        self.address = address
        found = urllib.parse.urlsplit(address)
        assert found.hostname is not None
        assert found.port is not None
        self._place = found.hostname, found.port
        try:
            self._secret = secret_of(os.environ.get(SECRET))
        except GateError as error:
            raise ConfigError(str(error)) from None

    def open(self, timeout_s: float) -> Channel:
        """Return a connection whose other side has the secret. Raises OSError or GateError."""
        connection = socket.create_connection(self._place, timeout=_CONNECT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                channel = Channel(connection, self._secret, accepts=False)
            except EOFError:
                raise GateError("it closes the connection: has it the same secret?") from None
            connection.settimeout(timeout_s)
        except BaseException:
            connection.close()
            raise
        return channel

    def asked(
        self, path: str, request: Mapping[str, Any] | None, timeout_s: float, most_bytes: int
    ) -> Any:
        """Return what the server behind it answers, as JSON says it. Raises GeneratorError."""
        call = {"call": "ask", "path": path, "request": request, "timeout": timeout_s}
        try:
            channel = self.open(timeout_s + _BEHIND_S)
            try:
                found, body = called(channel, call, most_bytes)
            finally:
                channel.close()
        except (OSError, EOFError, GateError) as error:
            raise self.failure(error) from None
        where = f"{self.address}, {path}"
        if found["status"] != 200:
            said = bytes(body[:500]).decode(errors="replace")
            raise GeneratorError(f"{where} refused with {found['status']}: {said}")
        return answered(where, bytes(body))

    def failure(self, error: Exception) -> GeneratorError:
        return GeneratorError(
            f"{self.address} does not answer ({error}). Does the gate run there, beside the "
            f"server, with the {SECRET} of this run?"
        )


def called(
    channel: Channel, call: Mapping[str, Any], most_bytes: int = 0
) -> tuple[dict[str, Any], bytearray]:
    """Return what a gate answers to a call. Raises GateError, EOFError or OSError."""
    channel.send(json.dumps(call).encode())
    found = json.loads(channel.receive(REPLY_BYTES))
    body = channel.receive(most_bytes)
    if "error" in found:
        raise GateError(str(found["error"])[:500])
    return found, body


@dataclass(frozen=True, slots=True, kw_only=True)
class _ThroughGate(CompletionsServer):
    """Completions of the server behind a gate."""

    gate: GateClient

    def __post_init__(self) -> None:
        pass

    def _answer(self, path: str, request: Mapping[str, Any], most_bytes: int) -> Any:
        return self.gate.asked(f"v1/{path}", request, self.timeout_s, most_bytes)


class FarServer(VllmServer):
    """A server behind a gate, on any host."""

    def copy_of(self, tensors: Sequence[NamedTensor]) -> WeightsCopy:
        return SentWeights(tensors, self._gate, self.timeout_s)

    def _completions(self, model: str) -> CompletionsServer:
        self._gate = GateClient(self.address)
        return _ThroughGate(
            url=self.address, model=model, timeout_s=self.timeout_s, gate=self._gate
        )

    def _reach(
        self,
        path: str,
        request: Mapping[str, Any] | None,
        timeout_s: float,
        most_bytes: int = REPLY_BYTES,
    ) -> Any:
        return self._gate.asked(path, request, timeout_s, most_bytes)


class SentWeights(WeightsCopy):
    """A copy in memory of a gate's host, sent there."""

    def __init__(self, tensors: Sequence[NamedTensor], gate: GateClient, timeout_s: float) -> None:
        super().__init__(tensors)
        self._gate, self._timeout_s = gate, timeout_s
        self._channel: Channel | None = None
        self._there: dict[str, int] = {}

    @property
    def address(self) -> dict[str, str | int]:
        return {**self._there, "name": self._name.hex()}

    def write(self, tensors: Sequence[NamedTensor], dtype: torch.dtype) -> dict[str, str]:
        """Send the next version; return when all of it is there. Raises GeneratorError."""
        if self._channel is not None:  # it may have broken since
            try:
                return self._sent(tensors, dtype)
            except (OSError, EOFError, GateError):
                self.close()
        try:
            self._channel = self._gate.open(self._timeout_s)
            call = {"call": "memory", "num_bytes": self.num_bytes}
            self._there, _ = called(self._channel, call)
            self._begin()
            return self._sent(tensors, dtype)
        except (OSError, EOFError, GateError) as error:
            self.close()
            raise self._gate.failure(error) from None

    def _sent(self, tensors: Sequence[NamedTensor], dtype: torch.dtype) -> dict[str, str]:
        assert self._channel is not None
        digests = super().write(tensors, dtype)
        called(self._channel, {"call": "wait"})
        return digests

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _put(self, start: int, data: Tensor) -> None:
        assert self._channel is not None
        for block in torch.split(data, BLOCK_BYTES):
            self._channel.send(json.dumps({"call": "put", "start": start}).encode())
            self._channel.send(as_memory(block))
            start += len(block)
