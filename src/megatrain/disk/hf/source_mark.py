"""A model folder in a few characters: enough to recognize another folder with the same model.

Reading all weights would take minutes. `source_mark` is what checkpoints keep: a hash of the
config, of each weights file's header, which names every tensor with its shape and place, and of
64 KiB at the start, the middle and the end of its data. A base model and one whose every tensor was
trained differ there. A model that differs in a few tensors may not: adapters merged into the
attention alone may leave the bytes of those places as they were.

`tensor_mark` is what ranks compare. It hashes the config, the name, dtype and shape of every tensor
that a reader would load, and 4 KiB at the start, the middle and the end of each of them, from
whichever file it is in. It sees a tensor that was trained, merged, replaced, cast or reshaped; a
single flipped bit it sees only in those bytes.

Laws (tests/disk/hf/test_source_mark.py)
    1. `tensor_mark` differs if any one tensor was trained, whichever it is.
    2. It is the same for a copy, also in other shards and beside files that no reader loads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from megatrain.disk.hf.folder import StoredTensor, read_config_bytes, read_folder
from megatrain.errors import DiskError
from megatrain.models.config_json import CONFIG_NAME, read_object

_SAMPLE_BYTES = 1 << 16
_TENSOR_SAMPLE_BYTES = 1 << 12
_NUM_READERS = 16
"""A network file system answers in a millisecond, and a model has up to 100,000 tensors."""
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
"""Keys that may differ in a copy of the same model."""


def source_mark(folder: Path) -> str | None:
    """Return the mark of a model folder; None if it cannot be read."""
    try:
        mark = xxhash.xxh3_128(_kept(json.loads((folder / CONFIG_NAME).read_bytes())))
        for path in sorted(folder.glob("*.safetensors")):
            for piece in _pieces(path):
                mark.update(piece)
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return mark.hexdigest()


def tensor_mark(folder: Path) -> str:
    """Return the mark of a model folder by its tensors.

    Raises ModelFolderError, ModelConfigError, WeightsFormatError or DiskError.
    """
    return mark_of_tensors(_kept(read_object(read_config_bytes(folder))), read_folder(folder))


def mark_of_tensors(about: bytes, tensors: Mapping[str, StoredTensor]) -> str:
    """Return the hash of `about` and of tensors: what describes them, and samples of their bytes.

    Raises DiskError.
    """
    mark = xxhash.xxh3_128(about)
    by_name = sorted(tensors.items())
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="mark") as pool:
        samples = pool.map(_sample, [tensor for _, tensor in by_name])
        for (name, tensor), sample in zip(by_name, samples, strict=True):
            mark.update(json.dumps([name, tensor.entry.dtype, tensor.entry.shape]).encode())
            mark.update(sample)
    return mark.hexdigest()


def _sample(tensor: StoredTensor) -> bytes:
    """Return the bytes of a small tensor, and of a large one its start, middle and end."""
    entry, size = tensor.entry, _TENSOR_SAMPLE_BYTES
    places = [entry.start, (entry.start + entry.stop - size) // 2, entry.stop - size]
    if entry.stop - entry.start <= 3 * size:
        places, size = [entry.start], entry.stop - entry.start
    try:
        with tensor.path.open("rb", buffering=0) as file:
            return b"".join(os.pread(file.fileno(), size, place) for place in places)
    except OSError as error:
        raise DiskError(f"cannot read {tensor.path}: {error.strerror}") from error


def _kept(config: Mapping[str, Any]) -> bytes:
    """Return a config without what may differ in a copy of the same model."""
    kept = {key: value for key, value in config.items() if key not in _VOLATILE}
    return json.dumps(kept, sort_keys=True).encode()


def _pieces(path: Path) -> list[bytes]:
    """Return the header of a weights file, as far as it is sane, and samples of its data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(8)
        start = 8 + min(int.from_bytes(header, "little"), size)
        pieces = [header, file.read(min(start - 8, 1 << 24))]
        for place in (start, (start + size) // 2, size - _SAMPLE_BYTES):
            file.seek(max(0, min(place, size)))
            pieces.append(file.read(_SAMPLE_BYTES))
    return pieces
