"""The fp32 masters of a checkpoint: `hi` from its model folder, `lo` from its state.

Moments are skipped: a model of masters takes 4 bytes per param. The state files are hashed on
the way, as a resume does it; the code that chose the checkpoint has checked its model.

Laws (tests/disk/checkpoint/test_masters.py)
    1. Masters have every bit of those that training had when the checkpoint was saved.
    2. A state file with a changed byte is named, and nothing is returned.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatrain.disk.checkpoint.checked_read import Take, read_checked
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.hf.model import HostModel, read_model_folder
from megatrain.disk.hf.safetensors_format import TensorEntry, read_entries
from megatrain.errors import CheckpointMismatch
from megatrain.memory.direct import CHUNK_BYTES, copy_bytes
from megatrain.memory.kinds import TensorKind
from megatrain.memory.store import Store
from megatrain.ranks.ownership import SOLE, Owner

_PREFIX = f"{TensorKind.LO}."


def load_masters(checkpoint: Path, owner: Owner = SOLE) -> HostModel:
    """Return what `owner` has of a checkpoint's bf16 model, with what masters have beyond it.

    Raises CheckpointCorrupted, CheckpointMismatch, DiskError, or what `load_model` raises. A rank
    finds damage in its own chunks only: `restore` says what follows.
    """
    home = read_model_folder(checkpoint / "model", dtype="bf16", frozen=(), attn=None).load(
        (TensorKind.HI, TensorKind.LO), owner=owner
    )
    fill_masters(checkpoint, home, owner)
    return home


def fill_masters(checkpoint: Path, home: HostModel, owner: Owner = SOLE) -> None:
    """Give a model that has the weights of a checkpoint what its masters have beyond them."""
    records = {
        name: record
        for name, record in read_manifest(checkpoint).files.items()
        if name.startswith("state/")
    }
    takes, spans = {}, {}
    for name, record in records.items():
        entries = read_entries(checkpoint / name)
        remainders = [entry for entry in entries if entry.name.startswith(_PREFIX)]
        places = [_target(checkpoint / name, entry, home.store) for entry in remainders]
        takes[name] = _filling(places)
        header = entries[0].start if entries else record.num_bytes
        spans[name] = _spans(record.num_bytes, header, places, owner)
    title = "reading masters of"
    read_checked(checkpoint, records, title, takes, spans, shown=owner.leads)


def _spans(
    num_bytes: int, header: int, places: list[tuple[int, Tensor]], owner: Owner
) -> list[range]:
    """Return the bytes to read: the header, what is here, and every N-th chunk of what is not."""
    turns = range(owner.rank * CHUNK_BYTES, num_bytes, owner.size * CHUNK_BYTES)
    return [
        range(header),
        *(range(first, first + len(memory)) for first, memory in places),
        *(range(start, start + 1) for start in turns),
    ]


def _filling(places: list[tuple[int, Tensor]]) -> Take:
    """Return what puts the remainders in a state file into the store."""

    def take(start: int, data: Tensor) -> None:
        for first, memory in places:
            begin, end = max(start, first), min(start + len(data), first + len(memory))
            if begin < end:
                copy_bytes(memory[begin - first : end - first], data[begin - start : end - start])

    return take


def _target(path: Path, entry: TensorEntry, store: Store) -> tuple[int, Tensor]:
    """Return what is here of a tensor: its first byte in the file, and its place in the store."""
    name = entry.name.removeprefix(_PREFIX)
    place = store.layout.places.get(name)
    if place is None or not place.has(TensorKind.LO) or entry.shape != place.param.shape:
        raise CheckpointMismatch(f"{path}: {entry.name[:200]} is not in the model beside it")
    memory = store.param(name, TensorKind.LO).view(-1).view(torch.uint8)
    return entry.start + place.owned.start * torch.int16.itemsize, memory
