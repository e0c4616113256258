"""A safetensors file, and the numbers of its tensors where they are: in memory or on disk.

Where ranks share a store, a tensor knows which of its numbers each rank has: it is their parts, one
behind the other. A rank reads and writes what is here (joint_files.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.disk.hf.names import FolderTensor, NameMap
from megatrain.disk.hf.safetensors_format import format_header
from megatrain.memory.direct import copy_bytes
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import Place, kind_dtype, overlap
from megatrain.memory.master import join
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder, Param
from megatrain.models.widening import widened_matrix
from megatrain.narrow import find_matrix

if TYPE_CHECKING:
    from megatrain.memory.tier.filling import TierFilling

PIECE_ELEMENTS = 4 << 20
"""Elements of a piece of a master, which is put together while it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor of a file: a name, a shape, and the numbers that are here, flat."""

    name: str
    shape: tuple[int, ...]
    values: Tensor
    first: int = 0
    """Which number of the tensor is the first here."""
    parts: tuple[range, ...] = ()
    """The numbers of each rank. Empty: each rank has all of them, and the first one gives them."""

    @property
    def memory(self) -> Tensor:
        """The bytes that are here: a view, to read and to fill."""
        return self.values.view(torch.uint8)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the file."""
        return self.values.dtype

    @property
    def num_bytes(self) -> int:
        """In the file, of all ranks."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def here(self) -> range:
        """Which of its bytes are here."""
        size = self.dtype.itemsize
        return range(self.first * size, (self.first + self.values.numel()) * size)

    def part_bytes(self, rank: int) -> int:
        """Return how many of its bytes a rank gives to the file."""
        if not self.parts:
            return self.num_bytes if rank == 0 else 0
        return len(self.parts[rank]) * self.dtype.itemsize

    def pieces(self) -> Iterator[Tensor]:
        """Yield the bytes that are here, one piece behind the other."""
        yield self.memory

    def put(self, start: int, data: Tensor, filling: TierFilling | None) -> None:
        """Take bytes that are here and were read, from byte `start` of the tensor on."""
        start -= self.here.start
        copy_bytes(self.memory[start : start + len(data)], data)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTensor(NamedTensor):
    """A param in a kind that is on disk; `values` has its dtype and size, and no memory."""

    store: Store
    param: str
    kind: TensorKind

    def pieces(self) -> Iterator[Tensor]:
        tier, place = self.store.tier, self.store.layout.places[self.param]
        assert tier is not None
        block = place.segment.block
        extent, part = tier.regions.numbers(place, self.kind), tier.regions.part(block, self.kind)
        return tier.pieces(block, self.kind, extent.start - part.start, extent.stop - part.start)

    def put(self, start: int, data: Tensor, filling: TierFilling | None) -> None:
        assert filling is not None
        filling.put(self.param, self.kind, start - self.here.start, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterTensor(NamedTensor):
    """A tensor that is written as its fp32 master."""

    lo: Callable[[], Tensor] | None
    """The rest of the master, brought from the disk if it is there; None: `values` is all."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowTensor(NamedTensor):
    """A tensor of a narrow param; `values` has its dtype and size. It is widened while written."""

    store: Store
    tensor: FolderTensor

    def pieces(self) -> Iterator[Tensor]:
        param = self.store.layout.places[self.tensor.param].param
        narrow = self.store.narrow(param.name)
        element, stop = self.tensor.start, self.tensor.start + self.tensor.num_elements
        while element < stop:
            spot = find_matrix(param.form, element)
            matrix = widened_matrix(spot, narrow, param.dtype)
            yield matrix.to(self.dtype).view(torch.uint8)
            element += matrix.numel()


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

    def spans_here(self) -> Iterator[range]:
        """Yield the bytes of the file that are of use here: the header, and what is here."""
        yield range(len(self.header))
        for start, tensor in self.placed():
            yield range(start + tensor.here.start, start + tensor.here.stop)


def state_tensor(store: Store, param: str, kind: TensorKind) -> NamedTensor:
    """Return a param in `kind` as a tensor of a state file, named `kind.param`."""
    place, owner = store.layout.places[param], store.layout.owner
    described = described_tensor(place.param, kind)
    numbers = [_numbers(kind, part) for part in place.parts]
    here = numbers[owner.rank]
    tensor = replace(
        described,
        values=described.values[here.start : here.stop],
        first=here.start,
        parts=() if owner.is_alone else tuple(numbers),
    )
    if kind in store.on_disk:
        return TierTensor(**tensor_fields(tensor), store=store, param=param, kind=kind)
    return replace(tensor, values=store.param(param, kind).view(-1))


def _numbers(kind: TensorKind, elements: range) -> range:
    """Return the numbers of `kind` that elements of a param have. No two ranks share one."""
    shared = kind.elements_per_number
    stop = -(-elements.stop // shared)
    return range(elements.start // shared if elements else stop, stop)


def described_tensor(param: Param, kind: TensorKind) -> NamedTensor:
    """Return what `state_tensor` does, without memory: name, shape and dtype."""
    size = -(-param.num_elements // kind.elements_per_number)
    shape = param.shape if kind.elements_per_number == 1 else (size,)
    values = torch.empty(size, dtype=kind_dtype(kind, param.dtype), device="meta")
    return NamedTensor(name=f"{kind}.{param.name}", shape=tuple(shape), values=values)


def folder_tensors(decoder: Decoder, store: Store) -> list[tuple[FolderTensor, NamedTensor]]:
    """Return the tensors of the model's folder as views of the store, no copies."""
    return placed_tensors(NameMap(decoder).tensors.values(), decoder, store)


def placed_tensors(
    tensors: Iterable[FolderTensor], decoder: Decoder, store: Store
) -> list[tuple[FolderTensor, NamedTensor]]:
    """Return tensors of a folder, each with what is here of it, as views of the store."""
    buffers, alone = decoder.persistent_buffers(), store.layout.owner.is_alone
    result: list[tuple[FolderTensor, NamedTensor]] = []
    for tensor in tensors:
        name, shape, place = tensor.name, tensor.shape, store.layout.places.get(tensor.param)
        if place is None:
            values = buffers[tensor.param].reshape(-1)[tensor.start :][: tensor.num_elements]
            result.append((tensor, NamedTensor(name=name, shape=shape, values=values)))
            continue
        if place.param.form:
            assert alone, "one process writes a model that is narrow"
            values = torch.empty(tensor.num_elements, dtype=place.param.dtype, device="meta")
            narrow = NarrowTensor(name=name, shape=shape, values=values, store=store, tensor=tensor)
            result.append((tensor, narrow))
            continue
        named = NamedTensor(
            name=name,
            shape=shape,
            values=_here(tensor, place, store.param(tensor.param, TensorKind.HI)),
            first=_of_tensor(tensor, place.owned).start,
            parts=() if alone else tuple(_of_tensor(tensor, part) for part in place.parts),
        )
        result.append((tensor, named))
    return result


def as_masters(
    tensors: Iterable[tuple[FolderTensor, NamedTensor]], store: Store
) -> list[tuple[FolderTensor, NamedTensor]]:
    """Return the same tensors, those that are params as fp32 masters."""
    result: list[tuple[FolderTensor, NamedTensor]] = []
    for tensor, plain in tensors:
        place = store.layout.places.get(tensor.param)
        if place is None:  # a buffer has no master
            result.append((tensor, plain))
            continue
        if isinstance(plain, NarrowTensor):
            result.append((tensor, replace(plain, values=plain.values.float())))
            continue
        lo = partial(_remainder, store, tensor) if place.has(TensorKind.LO) else None
        result.append((tensor, MasterTensor(**tensor_fields(plain), lo=lo)))
    return result


def _remainder(store: Store, tensor: FolderTensor) -> Tensor:
    place = store.layout.places[tensor.param]
    return _here(tensor, place, store.at_rest(tensor.param, TensorKind.LO))


def _here(tensor: FolderTensor, place: Place, numbers: Tensor) -> Tensor:
    """Return what is here of a folder's tensor; `numbers` are what is here of its param."""
    found, first = _of_tensor(tensor, place.owned), tensor.start - place.owned.start
    return numbers.view(-1)[found.start + first : found.stop + first]


def _of_tensor(tensor: FolderTensor, elements: range) -> range:
    """Return which elements of a param are the tensor's, counted from its first."""
    found = overlap(range(tensor.start, tensor.start + tensor.num_elements), elements)
    return range(found.start - tensor.start, found.stop - tensor.start)


def tensor_fields(tensor: NamedTensor) -> dict[str, Any]:
    """Return what a tensor consists of, to make one of another class."""
    return {field.name: getattr(tensor, field.name) for field in fields(NamedTensor)}
