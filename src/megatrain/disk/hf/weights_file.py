"""A safetensors file, written directly from the memory of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from megatrain.disk.hf.names import FolderTensor, NameMap
from megatrain.disk.hf.safetensors_format import format_header
from megatrain.memory.direct import DirectWriter, WriteQueue, copy_bytes
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import kind_dtype
from megatrain.memory.master import join
from megatrain.memory.store import Store
from megatrain.memory.tier_filling import TierFilling
from megatrain.models.decoder import Decoder, Param
from megatrain.progress import Advance

PIECE_ELEMENTS = 4 << 20
"""Of a master, which is put together while it is written."""


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

    @property
    def dtype(self) -> torch.dtype:
        """As the file has it."""
        return self.values.dtype

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.dtype.itemsize

    def pieces(self) -> Iterator[Tensor]:
        """Yield the bytes to write, one piece behind the other."""
        yield self.memory

    def put(self, start: int, data: Tensor, filling: TierFilling | None) -> None:
        """Take bytes that were read, from byte `start` of the tensor on."""
        copy_bytes(self.memory[start : start + len(data)], data)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTensor(NamedTensor):
    """A param in a kind that is on disk; `values` has its dtype and size, and no memory."""

    store: Store
    param: str
    kind: Kind

    def pieces(self) -> Iterator[Tensor]:
        tier, place = self.store.tier, self.store.layout.places[self.param]
        assert tier is not None
        block = place.segment.block
        extent, part = tier.regions.numbers(place, self.kind), tier.regions.part(block, self.kind)
        return tier.pieces(block, self.kind, extent.start - part.start, extent.stop - part.start)

    def put(self, start: int, data: Tensor, filling: TierFilling | None) -> None:
        assert filling is not None
        filling.put(self.param, self.kind, start, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterTensor(NamedTensor):
    """A tensor that is written as its fp32 master."""

    lo: Callable[[], Tensor] | None
    """What the master has beyond `values`, brought from the disk if it is there; None: nothing."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def pieces(self) -> Iterator[Tensor]:
        lo = None if self.lo is None else self.lo()
        for start in range(0, self.values.numel(), PIECE_ELEMENTS):
            span = slice(start, start + PIECE_ELEMENTS)
            hi = self.values[span]
            master = hi.float() if lo is None else join(hi, lo[span])
            yield master.view(torch.uint8)


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
        return format_header((t.name, t.dtype, t.shape) for t in self.tensors)

    def placed(self) -> Iterator[tuple[int, NamedTensor]]:
        """Yield each tensor with its first byte in the file."""
        start = len(self.header)
        for tensor in self.tensors:
            yield start, tensor
            start += tensor.num_bytes

    def fill(self, path: Path, carrier: WriteQueue, advance: Advance) -> DirectWriter:
        """Write all bytes to a new file; the tensors may change as soon as this returns.

        The caller finishes the file. Raises DiskError, and then leaves none.
        """
        writer = DirectWriter(path, self.num_bytes, carrier)
        try:
            writer.write(torch.frombuffer(bytearray(self.header), dtype=torch.uint8))
            for tensor in self.tensors:
                for piece in tensor.pieces():
                    writer.write(piece)
                    advance(len(piece))
            writer.let_go()
        except BaseException:
            writer.abandon()
            raise
        return writer


def state_tensor(store: Store, param: str, kind: Kind) -> NamedTensor:
    """Return a param in `kind` as a tensor of a state file, named `kind.param`."""
    described = described_tensor(store.layout.places[param].param, kind)
    name, shape = described.name, described.shape
    if kind not in store.on_disk:
        return NamedTensor(name=name, shape=shape, values=store.param(param, kind).view(-1))
    return TierTensor(
        name=name, shape=shape, values=described.values, store=store, param=param, kind=kind
    )


def described_tensor(param: Param, kind: Kind) -> NamedTensor:
    """Return what `state_tensor` does, without memory: name, shape and dtype."""
    size = -(-param.num_elements // kind.elements_per_number)
    shape = param.shape if kind.elements_per_number == 1 else (size,)
    values = torch.empty(size, dtype=kind_dtype(kind, param.dtype), device="meta")
    return NamedTensor(name=f"{kind}.{param.name}", shape=tuple(shape), values=values)


def folder_tensors(decoder: Decoder, store: Store) -> list[tuple[FolderTensor, NamedTensor]]:
    """Return the tensors of the model's folder as views of the store, no copies."""
    buffers = decoder.persistent_buffers()
    result = []
    for tensor in NameMap(decoder).tensors.values():
        source = buffers.get(tensor.param)
        if source is None:
            source = store.param(tensor.param, Kind.HI)
        values = _part(source, tensor)
        result.append((tensor, NamedTensor(name=tensor.name, shape=tensor.shape, values=values)))
    return result


def master_tensors(decoder: Decoder, store: Store) -> list[NamedTensor]:
    """Return the tensors of the model's folder, its params as fp32 masters."""
    result: list[NamedTensor] = []
    for tensor, plain in folder_tensors(decoder, store):
        place = store.layout.places.get(tensor.param)
        if place is None:  # a buffer has no master
            result.append(plain)
            continue
        lo = None
        if place.has(Kind.LO):
            lo = partial(_remainder, store, tensor)
        result.append(MasterTensor(name=plain.name, shape=plain.shape, values=plain.values, lo=lo))
    return result


def _remainder(store: Store, tensor: FolderTensor) -> Tensor:
    return _part(store.at_rest(tensor.param, Kind.LO), tensor)


def _part(param: Tensor, tensor: FolderTensor) -> Tensor:
    return param.reshape(-1)[tensor.start : tensor.start + tensor.num_elements]
