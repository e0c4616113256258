"""What frozen towers make of media: computed once, ahead of the run, and kept by content.

    <cache>/towers-<key>/<2 characters>/<digest>    one file for each item

A key has the towers' weights and whatever changes the bits; the digest is that of the item. A
second run computes nothing, whatever its rows are, and one that was stopped goes on where it was.
In a step an item is a read of its file, made ahead of the step with its micro-batch.

Of an item's own tensors only the small ones are kept: grids and sizes, which positions are made of.
Of pixels the shape is enough.

Laws (tests/run/evaluation/test_tower_outputs.py)
    1. An item that is read has the outputs that were computed, bit for bit.
    2. A second run computes nothing; other weights of a tower, or other pixels, are computed.
    3. A file that is damaged is computed again, and in a step it is a DataError that names it.
    4. Ranks divide the work among those that share a cache, so every host has all files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
import xxhash
from torch import Tensor

from megatrain import files
from megatrain.cache import cache_full, writable_cache_folder
from megatrain.data.tokens.prepared import digest_of
from megatrain.devices.device import Device
from megatrain.disk.hf.tower_weights import TowerWeights
from megatrain.errors import DataError, DiskFull
from megatrain.media import MediaItem, TowerOutputs
from megatrain.progress import counted_progress
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.text import size

ReadItem = Callable[[str], MediaItem]
"""Takes a digest."""
_SMALL_ELEMENTS = 1024
_LENGTH_BYTES = 8
_HEADER_BYTES = 1024
"""Headers are padded, so that files of items with equally many tokens are equally large."""
_LOOKS = (1, 16, 256)
"""After so many items it is asked whether all will fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFiles:
    """The files of one set of towers."""

    folder: Path
    makers: Sequence[int]
    """The ranks that write into the folder, this one included."""

    def path(self, digest: str) -> Path:
        """Return the file of an item."""
        return self.folder / digest[:2] / digest

    def has(self, digest: str) -> bool:
        """Return whether an item's file is there and whole."""
        try:
            self.read(digest)
        except DataError:
            return False
        return True

    def read(self, digest: str) -> MediaItem:
        """Return an item with its outputs. Raises DataError."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
            length = int.from_bytes(data[:_LENGTH_BYTES], "little")
            body = memoryview(data)[_LENGTH_BYTES + length :]
            header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
            if header["hash"] != _hash(body):
                raise ValueError("its bytes are not those that were written")
            found, start = [], 0
            for dtype, shape, is_kept in header["tensors"]:
                tensor, start = _tensor(body, start, getattr(torch, dtype), shape, is_kept)
                found.append(tensor)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}: the output of a tower cannot be read: {error}. Resume the run: it is "
                "computed again."
            ) from error
        names = header["names"]
        return MediaItem(
            kind=header["kind"],
            tensors=dict(zip(names, found, strict=False)),
            digest=digest,
            outputs=TowerOutputs(structure=header["calls"], tensors=tuple(found[len(names) :])),
        )

    def write(self, item: MediaItem, outputs: TowerOutputs) -> int:
        """Keep an item and its outputs; return the bytes. Raises DiskError."""
        own = [
            (tensor, not tensor.is_floating_point() or tensor.numel() <= _SMALL_ELEMENTS)
            for tensor in item.tensors.values()
        ]
        tensors = [*own, *((tensor, True) for tensor in outputs.tensors)]
        body = b"".join(_bytes(tensor) for tensor, is_kept in tensors if is_kept)
        header = {
            "kind": item.kind,
            "names": list(item.tensors),
            "calls": outputs.structure,
            "tensors": [
                [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), is_kept]
                for tensor, is_kept in tensors
            ],
            "hash": _hash(memoryview(body)),
        }
        told = json.dumps(header).encode()
        told = told.ljust(-(-len(told) // _HEADER_BYTES) * _HEADER_BYTES)
        path = self.path(item.digest)
        data = len(told).to_bytes(_LENGTH_BYTES, "little") + told + body
        try:
            files.make_folder(path.parent)
            files.write_file(path, data, durable=False)  # its hash shows what a power loss leaves
        except DiskFull as error:
            raise _full(f"{self.folder} has no room for the outputs of towers") from error
        return len(data)


class Computed(NamedTuple):
    """Items of which towers ran on this rank, and for how long."""

    items: int
    seconds: float


def compute_outputs(
    digests: Sequence[str],
    read: ReadItem,
    weights: TowerWeights,
    device: Device,
    ranks: Ranks = ALONE,
    *,
    facts: Sequence[Any] = (),
) -> tuple[OutputFiles, Computed | None]:
    """Return the files of items, and what was computed of those that were not there; None: none.

    All ranks call it, and each computes its share for those of its cache. `facts` change the bits,
    besides weights, device and versions. Raises DiskFull or DiskError.
    """
    kind = device.name.partition(":")[0]
    versions = (torch.__version__, transformers.__version__)
    key = digest_of([weights.mark(), repr((kind, versions, *facts))])
    cache = writable_cache_folder()
    makers = ranks.sharing(cache)
    outputs = OutputFiles(folder=cache / f"towers-{key}", makers=makers)
    own = digests[makers.index(ranks.owner.rank) :: len(makers)]
    missing = [digest for digest in own if not outputs.has(digest)]
    if not ranks.any(bool(missing)):
        return outputs, None
    return outputs, ranks.long_work(
        lambda: _compute(missing, read, weights, device, outputs, ranks)
    )


def _compute(
    digests: Sequence[str],
    read: ReadItem,
    weights: TowerWeights,
    device: Device,
    outputs: OutputFiles,
    ranks: Ranks,
) -> Computed | None:
    if not digests:
        return None
    written = 0
    with (
        weights.running(device) as towers,
        counted_progress("outputs of towers", len(digests), "media", shown=ranks.leads) as advance,
    ):
        begun = time.monotonic()
        for number, digest in enumerate(digests, start=1):
            item = read(digest)
            written += outputs.write(item, towers.outputs(item))
            advance(1)
            if number in _LOOKS:
                _require_room(outputs.folder, written / number * (len(digests) - number))
        return Computed(len(digests), time.monotonic() - begun)


def _require_room(folder: Path, num_bytes: float) -> None:
    """Raise DiskFull if the outputs that are still to come will not fit."""
    free = files.free_disk_bytes(folder)
    if num_bytes > free:
        raise _full(
            f"{folder}: the outputs of towers will need about {size(num_bytes)} more, and "
            f"{size(free)} are free"
        )


def _full(problem: str) -> DiskFull:
    return cache_full(problem, "let the processor make smaller images: data.processor_kwargs")


def _hash(body: memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(body)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _tensor(
    body: memoryview, start: int, dtype: torch.dtype, shape: list[int], is_kept: bool
) -> tuple[Tensor, int]:
    """Return a tensor, and where the next begins; of one that was not kept it has the shape."""
    if not is_kept:
        return torch.zeros((), dtype=dtype).expand(shape), start
    count = 1
    for one in shape:
        count *= one
    stop = start + count * dtype.itemsize
    if stop > len(body):
        raise ValueError("it is too short")
    flat = torch.frombuffer(bytearray(body[start:stop]), dtype=torch.uint8)
    return flat.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype), stop
