"""The weights of a Hugging Face folder: which file holds which tensor, before any weight is read.

A folder is foreign input. Its index may name only plain files inside it, and a link counts as
inside only where the Hugging Face cache puts its links: from `snapshots/X` into `blobs`.

Laws (tests/disk/test_folder.py)
    1. No name in a folder makes us open a file outside it, or one that is not a regular file.
    2. Index and files agree on every tensor, or a WeightsFormatError names those where they do not.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.disk.safetensors_format import TensorEntry, read_entries
from megatrain.errors import ModelFolderError, WeightsFormatError, listing

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor and the file that holds it."""

    path: Path
    entry: TensorEntry


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the folder's weights, by name."""
    if not folder.is_dir():
        raise ModelFolderError(f"{folder} is not a folder. Give a local Hugging Face model folder.")
    if (folder / SINGLE_NAME).exists():
        path = resolve(folder, SINGLE_NAME)
        return {e.name: StoredTensor(path=path, entry=e) for e in read_entries(path)}
    if (folder / INDEX_NAME).exists():
        return _read_shards(folder)
    others = [p.name for p in folder.glob("*.bin")] + [p.name for p in folder.glob("*.safetensors")]
    hint = f" It has {listing(others)}, which are not read; convert them first." if others else ""
    raise ModelFolderError(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}.{hint}")


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    index_path = resolve(folder, INDEX_NAME)
    if index_path.stat().st_size > MAX_INDEX_BYTES:
        raise WeightsFormatError(f"{INDEX_NAME} is larger than {MAX_INDEX_BYTES >> 20} MiB")
    wanted = parse_index(index_path.read_bytes())
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(wanted.values())):
        path = resolve(folder, shard)
        for entry in read_entries(path):
            if wanted.get(entry.name) != shard:
                raise WeightsFormatError(
                    f"{shard} holds tensor {entry.name[:200]!r}, but {INDEX_NAME} says otherwise"
                )
            found[entry.name] = StoredTensor(path=path, entry=entry)
    absent = wanted.keys() - found.keys()
    if absent:
        raise WeightsFormatError(
            f"{INDEX_NAME} places {len(absent)} tensors in files that lack them: {listing(absent)}"
        )
    return found


def parse_index(data: bytes) -> dict[str, str]:
    """Return the index's map from tensor to shard name. Raises WeightsFormatError."""
    try:
        index: Any = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsFormatError(f"{INDEX_NAME} is not valid JSON: {str(error)[:200]}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsFormatError(f"{INDEX_NAME} has no weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise WeightsFormatError(
                f"{INDEX_NAME} places {tensor[:200]!r} in {str(shard)[:200]!r}, "
                "which is not a plain name of a safetensors file"
            )
    return weight_map


def resolve(folder: Path, name: str) -> Path:
    """Return the real path of a regular file in `folder`; refuse one that leads out of it."""
    base = folder.resolve()
    path = (base / name).resolve()
    homes = [base]
    if base.parent.name == "snapshots":  # the Hugging Face cache
        homes.append(base.parent.parent / "blobs")
    if not any(path.is_relative_to(home) for home in homes):
        raise ModelFolderError(f"{folder / name} leads out of the folder, to {path}: refused")
    if not path.exists():
        raise ModelFolderError(f"{folder / name} does not exist")
    if not path.is_file():
        raise ModelFolderError(f"{folder / name} is not a regular file: refused")
    return path
