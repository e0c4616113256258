"""Weights in memory that a server can read: a copy, under the names of the folder.

    head       64 bytes: mark, name of the copy, counter, bytes of the table
    table      JSON: name of a tensor -> dtype, shape, first byte
    tensors    each from a multiple of 64 bytes on

The counter is twice the version when all weights of that version are there, and odd while they are
written. The memory has no file: a reader opens it by process and descriptor, and the system frees
it when both have ended, however they end.

Digests are those of the weights that the copy was made from, in the dtype of the reader, not of the
copy: a byte that was lost on the way shows. A zero counts without its sign, because a reader that
keeps weights in another order gets them back by a product, which has none.

Laws (tests/rewards/test_shared_weights.py)
    1. A reader finds all weights of the version that it asks for, bit for bit, or is refused.
    2. A copy whose writer died in the middle is never taken for a version.
    3. A byte that differs anywhere is noticed by the digest of its tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import secrets
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from megatrain.disk.hf.weights_file import NamedTensor
from megatrain.errors import ConfigError
from megatrain.files import reserve
from megatrain.memory.direct import copy_bytes
from megatrain.memory.host import free_bytes
from megatrain.memory.ledger import Ledger, Line

MARK = b"MEGAWGT1"
HEAD = struct.Struct("<8s16sQQ")
"""Mark, name, counter, bytes of the table."""
_COUNTER = struct.Struct("<Q")
_COUNTER_AT = 24
HEAD_BYTES = 64
_ALIGNED = 64
_PIECE_ELEMENTS = 1 << 15
"""Few enough that torch starts no team of threads in each of ours."""


class WeightsCopy(ABC):
    """A copy of a model's weights; made once, written before each use."""

    def __init__(self, tensors: Sequence[NamedTensor]) -> None:
        """Lay out `tensors`."""
        self._table, self.num_bytes = _table(tensors)
        self.version = 0
        self._name = secrets.token_bytes(16)
        self._places = {name: place for name, (_, _, place) in json.loads(self._table).items()}

    @property
    @abstractmethod
    def address(self) -> dict[str, str | int]:
        """Where a process on the server's host finds the weights."""

    @abstractmethod
    def _put(self, start: int, data: Tensor) -> None:
        """Write bytes where they belong, after all that was written before."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory; readers keep theirs. A second call does nothing."""

    @property
    def label(self) -> str:
        """Name of the weights that were written last; no other weights ever have it."""
        return f"{self._name.hex()}-{self.version}"

    def write(self, tensors: Sequence[NamedTensor], dtype: torch.dtype) -> dict[str, str]:
        """Copy the next version; return the digest of each tensor in `dtype`.

        `tensors` are the ones it was made for, in their order. Nobody may read meanwhile: a reader
        that does finds out by the counter.
        """
        self._count(2 * self.version + 1)
        num_threads = _num_threads()
        waiting: deque[tuple[str, Future[str]]] = deque()
        digests: dict[str, str] = {}
        with ThreadPoolExecutor(max_workers=num_threads) as pool:
            for tensor in tensors:
                pieces = list(tensor.pieces())  # views, but for what is merged or widened
                waiting.append((tensor.name, pool.submit(_digest, pieces, tensor.dtype, dtype)))
                start = self._places[tensor.name]
                for piece in pieces:
                    self._put(start, piece)
                    start += len(piece)
                while len(waiting) > (num_threads if tensor is not tensors[-1] else 0):
                    name, digest = waiting.popleft()
                    digests[name] = digest.result()
        self.version += 1
        self._count(2 * self.version)
        return digests

    def _begin(self) -> None:
        """Write what stays: the head, with a counter of no version, and the table."""
        head = HEAD.pack(MARK, self._name, 1, len(self._table))
        self._put(0, _as_tensor(head))
        self._put(HEAD_BYTES, _as_tensor(self._table))

    def _count(self, counter: int) -> None:
        self._put(_COUNTER_AT, _as_tensor(_COUNTER.pack(counter)))


class SharedWeights(WeightsCopy):
    """A copy in memory of this host."""

    purpose: Final = "weights for vLLM"
    """Its line in a plan, which has counted it."""

    def __init__(self, tensors: Sequence[NamedTensor]) -> None:
        """Take the memory for `tensors`. Raises DoesNotFit or ConfigError."""
        super().__init__(tensors)
        Ledger([Line(place="host", purpose=self.purpose, num_bytes=self.num_bytes)]).require(
            "host", free_bytes()
        )
        if not hasattr(os, "memfd_create"):
            raise ConfigError("weights in shared memory need Linux: draw with rollouts.engine own")
        self._fd = os.memfd_create("megatrain-weights")
        reserve(self._fd, self.num_bytes)
        self._map = mmap.mmap(self._fd, self.num_bytes)
        self._arena = torch.frombuffer(self._map, dtype=torch.uint8)
        self._begin()

    @property
    def address(self) -> dict[str, str | int]:
        return {"process": os.getpid(), "descriptor": self._fd, "name": self._name.hex()}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _put(self, start: int, data: Tensor) -> None:
        copy_bytes(self._arena[start : start + len(data)], data)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def digest_of(tensor: NamedTensor, dtype: torch.dtype) -> str:
    """Return the digest of a tensor's numbers in `dtype`."""
    return _digest(tensor.pieces(), tensor.dtype, dtype)


def _digest(pieces: Iterable[Tensor], given: torch.dtype, dtype: torch.dtype) -> str:
    total = hashlib.sha256()
    for piece in pieces:
        for part in torch.split(piece.view(given), _PIECE_ELEMENTS):
            total.update((part.to(dtype) + 0).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _table(tensors: Sequence[NamedTensor]) -> tuple[bytes, int]:
    """Return the table, and the bytes of all. Places follow the table, whose size they are in."""
    size = 0
    while True:
        start, rows = _after(HEAD_BYTES + size), {}
        for tensor in tensors:
            dtype = str(tensor.dtype).removeprefix("torch.")
            rows[tensor.name] = [dtype, list(tensor.shape), start]
            start = _after(start + math.prod(tensor.shape) * tensor.dtype.itemsize)
        table = json.dumps(rows).encode()
        if len(table) <= size:
            return table.ljust(size), start
        size = len(table)


def _after(end: int) -> int:
    return -(-end // _ALIGNED) * _ALIGNED


def _num_threads() -> int:
    with suppress(AttributeError):  # not on macOS
        return min(8, len(os.sched_getaffinity(0)))
    return 1
