"""Tensors that a model carries: from its folder to every checkpoint and export, as they are.

They are what a joint model has beside its text, and of any model the heads that predict more than
the next token (MTP), which transformers leaves out and programs that serve the model read.

They are not in memory. A file that has them is written by reading them from the source in pieces,
whatever their dtype, under the names that the source gives them. Quantized heads are written
dequantized, as all of the model is.

An export over the source replaces its files: a tensor is looked up again when the file that had it
is another.

Laws (tests/disk/hf/test_multimodal_tensors.py)
    1. A copy has the name, dtype, shape and bytes of the source.
    2. Memory grows by pieces that are on their way, not by the tensors.
    3. A source that has lost a tensor, or has another of its name, is a DiskError.
    4. A quantized head has the bits that loading it would give.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatrain.disk.hf.dequantize import Scaled, pair_scales
from megatrain.disk.hf.folder import StoredTensor, read_folder
from megatrain.disk.hf.load import READ_BYTES, is_ignorable, is_spare_head
from megatrain.disk.hf.names import NameMap
from megatrain.disk.hf.safetensors_format import DTYPES
from megatrain.disk.hf.weights_file import NamedTensor
from megatrain.errors import DiskError
from megatrain.memory.arena import aligned_buffer
from megatrain.memory.direct import CHUNK_BYTES, DISK_PAGE, DirectReader
from megatrain.models.decoder import Decoder
from megatrain.quantization import Quantization


class SourceFolder:
    """The folder that has the carried tensors now."""

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        self._folder, self._tensors = folder, tensors
        self._files = {stored.path: _identity(stored.path) for stored in tensors.values()}

    def find(self, name: str) -> StoredTensor:
        """Return a tensor, looked up again if its file was replaced. Raises DiskError."""
        stored = self._tensors[name]
        if _identity(stored.path) != self._files[stored.path]:
            self._tensors = read_folder(self._folder)
            self._files = {one.path: _identity(one.path) for one in self._tensors.values()}
        found = self._tensors.get(name)
        if found is None or _form(found) != _form(stored):
            raise DiskError(f"{self._folder} has changed: it no longer has {name} as it was")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor(NamedTensor):
    """A tensor that is in a folder and nowhere else; `values` has its dtype and no memory."""

    source: SourceFolder

    def pieces(self) -> Iterator[Tensor]:
        stored = self.source.find(self.name)
        with DirectReader(stored.path) as reader:
            for start in range(stored.entry.start, stored.entry.stop, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, stored.entry.stop)
                # Its own memory: a writer copies a piece when it gets to it.
                yield reader.read(start, stop, aligned_buffer(stop - start + 2 * DISK_PAGE))


@dataclass(frozen=True, slots=True, kw_only=True)
class WidenedTensor(SourceTensor):
    """A quantized tensor of a folder; `values` has the dtype that it is written in."""

    scaled: Scaled

    def pieces(self) -> Iterator[Tensor]:
        names = [self.scaled.values.entry.name, self.scaled.scales.entry.name]
        values, scales = (self.source.find(name) for name in names)
        scaled = replace(self.scaled, values=values, scales=scales)
        with ExitStack() as stack:
            paths = {values.path, scales.path}
            readers = {path: stack.enter_context(DirectReader(path)) for path in sorted(paths)}
            buffer = aligned_buffer(READ_BYTES + 2 * DISK_PAGE)
            for piece in scaled.pieces(range(self.values.numel()), self.dtype):
                for run in piece.runs(readers, buffer):
                    yield run.values.view(torch.uint8)


def carried_tensors(
    folder: Path, decoder: Decoder, quantization: Quantization | None = None
) -> list[SourceTensor]:
    """Return what `folder` has beside the params of the model, wide numbers first.

    The folder was matched with the model before (load.py).
    """
    names, stored, scaled = NameMap(decoder), read_folder(folder), dict[str, Scaled]()
    tensors = stored
    if quantization is not None:
        tensors, scaled = pair_scales(stored, quantization)
    is_kept = is_ignorable if decoder.carried else is_spare_head
    kept = {
        name: one
        for name, one in sorted(tensors.items(), key=_wide_first)
        if names.find(name) is None
        and names.find_alias(name) is None
        and (names.is_carried(name) or is_kept(decoder, name))
    }
    source = SourceFolder(folder, stored)
    found: list[SourceTensor] = []
    for name, one in kept.items():
        if name in scaled:
            values = _without_memory(scaled[name].shape, decoder.model.dtype)
            shape, quantized = scaled[name].shape, scaled[name]
            found.append(
                WidenedTensor(
                    name=name, shape=shape, values=values, source=source, scaled=quantized
                )
            )
        else:
            values = _without_memory(one.entry.shape, DTYPES[one.entry.dtype])
            found.append(
                SourceTensor(name=name, shape=one.entry.shape, values=values, source=source)
            )
    return found


def _without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").view(-1)


def _wide_first(item: tuple[str, StoredTensor]) -> tuple[int, str]:
    """Return a key that sorts wide numbers first, so that all tensors of the file are aligned."""
    name, stored = item
    return -DTYPES[stored.entry.dtype].itemsize if stored.entry.dtype in DTYPES else 0, name


def _form(stored: StoredTensor) -> tuple[str, tuple[int, ...]]:
    return stored.entry.dtype, tuple(stored.entry.shape)


def _identity(path: Path) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise DiskError(f"cannot read {path}: {error.strerror}") from error
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
