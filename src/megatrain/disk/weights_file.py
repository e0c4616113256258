"""A safetensors file that is written straight from where its tensors live."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from megatrain.disk.direct import DirectWriter, WriteQueue
from megatrain.disk.names import FolderTensor, NameMap
from megatrain.disk.safetensors_format import format_header
from megatrain.memory.layout import Kind
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder
from megatrain.progress import Advance


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor of a file: a name, a shape, and the elements where they are, flat."""

    name: str
    shape: tuple[int, ...]
    values: Tensor

    @property
    def memory(self) -> Tensor:
        """Its bytes: a view, to read and to fill."""
        return self.values.view(torch.uint8)


@dataclass(frozen=True, kw_only=True)
class WeightsFile:
    """A file's name and tensors; its bytes are known before any is written."""

    name: str
    tensors: Sequence[NamedTensor]

    @cached_property
    def header(self) -> bytes:
        return self._formatted[0]

    @property
    def data_bytes(self) -> int:
        return self._formatted[1]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + self.data_bytes

    @cached_property
    def _formatted(self) -> tuple[bytes, int]:
        return format_header((t.name, t.values.dtype, t.shape) for t in self.tensors)

    def placed(self) -> Iterator[tuple[int, NamedTensor]]:
        """Yield each tensor with its first byte in the file."""
        start = len(self.header)
        for tensor in self.tensors:
            yield start, tensor
            start += tensor.values.nbytes

    def fill(self, path: Path, carrier: WriteQueue, advance: Advance) -> DirectWriter:
        """Write all bytes to a new file; the tensors may change as soon as this returns.

        The caller finishes the file. Raises DiskError, and then leaves none.
        """
        writer = DirectWriter(path, self.num_bytes, carrier)
        try:
            writer.write(torch.frombuffer(bytearray(self.header), dtype=torch.uint8))
            for tensor in self.tensors:
                writer.write(tensor.memory)
                advance(tensor.values.nbytes)
            writer.let_go()
        except BaseException:
            writer.abandon()
            raise
        return writer


def folder_tensors(decoder: Decoder, store: Store) -> list[tuple[FolderTensor, NamedTensor]]:
    """Return the tensors of the model's folder as views of the store, no copies."""
    buffers = decoder.persistent_buffers()
    result = []
    for tensor in NameMap(decoder).tensors.values():
        source = buffers.get(tensor.param)
        if source is None:
            source = store.param(tensor.param, Kind.HI)
        values = source.reshape(-1)[tensor.start : tensor.start + tensor.num_elements]
        result.append((tensor, NamedTensor(name=tensor.name, shape=tensor.shape, values=values)))
    return result
