"""Reading a checkpoint back: every chunk is compared with its hash before it is used.

`verify` reads a folder and names damaged files. `restore` does the same and puts the bytes where
they belong in the store on the way: one pass over the disk (checked_read.py).

Where ranks share a store, each reads the chunks that have a part of what it owns, whatever number
of ranks has saved them. All together read every chunk.

Laws (tests/disk/checkpoint/test_restore.py, tests/disk/checkpoint/test_restore_ranks.py)
    1. The restored state is bit-identical to the saved one.
    2. A changed, missing, cut, swapped or stale file is found, and the tensor in it named.
    3. After CheckpointCorrupted the store holds no bytes that failed their hash; it holds a
       mixture, and another checkpoint must be restored before it is used.
    4. Each chunk is compared by a rank that uses it, and no rank reads a chunk without use for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.disk.checkpoint.checked_read import Take, read_checked
from megatrain.disk.checkpoint.manifest import Manifest, read_manifest
from megatrain.disk.checkpoint.parts import Parts
from megatrain.disk.hf.safetensors_format import DTYPE_NAMES, read_entries
from megatrain.disk.hf.weights_file import WeightsFile
from megatrain.errors import (
    CheckpointCorrupted,
    CheckpointMismatch,
    DiskError,
    WeightsFormatError,
    listing,
)
from megatrain.memory import optional
from megatrain.memory.store import Store

if TYPE_CHECKING:
    from megatrain.disk.checkpoint.conversion import Conversion
    from megatrain.memory.tier.filling import TierFilling


def verify(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint of which every byte is right.

    Raises CheckpointCorrupted, CheckpointMismatch or DiskError.
    """
    manifest = read_manifest(folder)
    read_checked(folder, manifest.files, "verifying")
    return manifest


def verify_model(folder: Path) -> Manifest:
    """Do what `verify` does for the model alone, a sixth of the bytes: enough to export it."""
    manifest = read_manifest(folder)
    model = {name: r for name, r in manifest.files.items() if name.startswith("model/")}
    read_checked(folder, model, "checking")
    return manifest


def restore(
    folder: Path, manifest: Manifest, parts: Parts, conversion: Conversion | None = None
) -> None:
    """Fill the tensors of `parts` from a checkpoint, which may keep its states differently.

    Raises CheckpointCorrupted, CheckpointMismatch or DiskError. A rank finds damage in its own
    chunks only: where ranks share the store, call this within `Agreement(ranks.agree)`
    (ranks/agreement.py), so that all raise, and go back to the same older checkpoint.
    """
    files = {file.name: file for files in parts.blocks for file in files}
    converted = {} if conversion is None else conversion.files()
    if manifest.model != parts.model:
        raise CheckpointMismatch(
            f"{folder} belongs to another model, or model.frozen or model.dtype differ. "
            "Resume with the model and settings it was saved with."
        )
    for name, file in (parts.files | converted).items():
        record = manifest.files.get(name)
        if record is None or record.num_bytes != file.num_bytes:
            _require_states(folder / name, file)
            raise CheckpointCorrupted(f"{folder / name} does not match the model of the manifest")
    for name, file in converted.items():
        _require_states(folder / name, file)
    plain = {name: record for name, record in manifest.files.items() if name not in converted}
    with _filling(parts.store) as filling:
        here = {name: file for name, file in files.items() if name in plain}
        takes = {name: _take(folder / name, file, filling) for name, file in here.items()}
        spans = {name: file.spans_here() for name, file in here.items()}
        shown = parts.store is None or parts.store.layout.owner.leads
        read_checked(folder, plain, "resuming", takes, spans, shown=shown)
        if conversion is not None:
            conversion.convert(folder, manifest.files, files, filling)


def _require_states(path: Path, file: WeightsFile) -> None:
    """Raise CheckpointMismatch if a state file holds what another optimizer keeps."""
    if not file.name.startswith("state/"):
        return
    try:
        found = _states((entry.name, entry.dtype) for entry in read_entries(path))
    except (WeightsFormatError, DiskError):
        return  # it is damaged, as the caller is about to report
    wanted = _states((tensor.name, DTYPE_NAMES[tensor.dtype]) for tensor in file.tensors)
    if found != wanted:
        raise CheckpointMismatch(
            f"{path}: holds {listing(found)}, and this run's optimizer keeps {listing(wanted)}. "
            "Resume with the optimizer that saved the checkpoint, or start a new run from the "
            "model/ folder beside it."
        )


def _states(tensors: Iterable[tuple[str, str]]) -> set[str]:
    """Return the kinds of tensors with their dtypes, from `kind.param`: {"lo (I16)", "m (F32)"}."""
    return {f"{name.partition('.')[0]} ({dtype})" for name, dtype in tensors}


def _filling(store: Store | None) -> AbstractContextManager[TierFilling | None]:
    if store is None or store.tier is None:
        return nullcontext()
    return optional.filling.TierFilling(store.layout, store.tier)


def _take(path: Path, file: WeightsFile, filling: TierFilling | None) -> Take:
    """Return what puts a file's chunks into its tensors."""
    header = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
    places = [
        (start, start + tensor.here.start, start + tensor.here.stop, tensor)
        for start, tensor in file.placed()
        if tensor.here
    ]

    def take(start: int, data: Tensor) -> None:
        stop = start + len(data)
        if start < len(header) and not torch.equal(header[start:stop], data[: len(header) - start]):
            _require_states(path, file)
            raise CheckpointMismatch(f"{file.name}: its tensors do not match this model")
        for origin, first, last, tensor in places:
            begin, end = max(start, first), min(stop, last)
            if begin < end:
                tensor.put(begin - origin, data[begin - start : end - start], filling)

    return take
