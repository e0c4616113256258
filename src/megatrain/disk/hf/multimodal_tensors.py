"""Tensors that a joint model carries: from its folder to every checkpoint and export, as they are.

They are not in memory. A file that has them is written by reading them from the source in pieces,
whatever their dtype, under the names that the source gives them. What transformers ignores in a
folder of the family (heads for several tokens at once) is carried too.

An export over the source replaces its files: a tensor is looked up again when the file that had it
is another.

Laws (tests/disk/hf/test_multimodal_tensors.py)
    1. A copy has the name, dtype, shape and bytes of the source.
    2. Memory grows by pieces that are on their way, not by the tensors.
    3. A source that has lost a tensor, or has another of its name, is a DiskError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatrain.disk.hf.folder import StoredTensor, read_folder
from megatrain.disk.hf.load import is_ignorable
from megatrain.disk.hf.names import NameMap
from megatrain.disk.hf.safetensors_format import DTYPES
from megatrain.disk.hf.weights_file import NamedTensor
from megatrain.errors import DiskError
from megatrain.memory.direct import CHUNK_BYTES, DISK_PAGE, DirectReader, aligned_buffer
from megatrain.models.decoder import Decoder


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


def carried_tensors(folder: Path, decoder: Decoder) -> list[SourceTensor]:
    """Return what `folder` has beside the text of a joint model, wide numbers first.

    The folder was matched with the model before (load.py).
    """
    if not decoder.carried:
        return []
    names, tensors = NameMap(decoder), read_folder(folder)
    kept = {
        name: stored
        for name, stored in sorted(tensors.items(), key=_wide_first)
        if names.find(name) is None
        and names.find_alias(name) is None
        and (names.is_carried(name) or is_ignorable(decoder, name))
    }
    source = SourceFolder(folder, kept)
    return [
        SourceTensor(
            name=name,
            shape=stored.entry.shape,
            values=torch.empty(
                stored.entry.shape, dtype=DTYPES[stored.entry.dtype], device="meta"
            ).view(-1),
            source=source,
        )
        for name, stored in kept.items()
    ]


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
