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
from megatrain.memory.direct import copy_bytes
from megatrain.memory.kinds import Kind
from megatrain.memory.store import Store

_PREFIX = f"{Kind.LO}."


def load_masters(checkpoint: Path) -> HostModel:
    """Return the model of a checkpoint of bf16 weights, with what its masters have beyond them.

    Raises CheckpointDamaged, CheckpointMismatch, DiskError, or what `load_model` raises.
    """
    home = read_model_folder(checkpoint / "model", dtype="bf16", frozen=(), attn=None).load(
        (Kind.HI, Kind.LO)
    )
    records = {
        name: record
        for name, record in read_manifest(checkpoint).files.items()
        if name.startswith("state/")
    }
    takes = {name: _filling(checkpoint / name, home.store) for name in records}
    read_checked(checkpoint, records, "reading masters of", takes)
    return home


def _filling(path: Path, store: Store) -> Take:
    """Return what puts the remainders in a state file into the store."""
    places = [
        (entry.start, _target(path, entry, store))
        for entry in read_entries(path)
        if entry.name.startswith(_PREFIX)
    ]

    def take(start: int, data: Tensor) -> None:
        for first, memory in places:
            begin, end = max(start, first), min(start + len(data), first + len(memory))
            if begin < end:
                copy_bytes(memory[begin - first : end - first], data[begin - start : end - start])

    return take


def _target(path: Path, entry: TensorEntry, store: Store) -> Tensor:
    name = entry.name.removeprefix(_PREFIX)
    place = store.layout.places.get(name)
    if place is None or not place.has(Kind.LO) or entry.shape != place.param.shape:
        raise CheckpointMismatch(f"{path}: {entry.name[:200]} is not in the model beside it")
    return store.param(name, Kind.LO).view(-1).view(torch.uint8)
