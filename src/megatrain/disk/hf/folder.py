"""The files of a Hugging Face folder: config, tokenizer, and which file holds which tensor.

A folder is untrusted input. Its index may name only plain files inside it, and a link counts as
inside only where the Hugging Face cache puts its links: from `snapshots/X` into the `blobs` of the
model, and from there into the store that all models of the cache share.

Laws (tests/disk/hf/test_folder.py)
    1. No name in a folder makes us open a file outside it, or one that is not a regular file.
    2. Index and files agree on every tensor, or a WeightsFormatError names those where they do not.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.disk.hf.safetensors_format import MAX_NAME, TensorEntry, read_entries, unique_keys
from megatrain.errors import (
    DiskError,
    ModelConfigError,
    ModelFolderError,
    WeightsFormatError,
    listing,
)
from megatrain.model_files import ADAPTER_CONFIG_NAME, CARRIED, INDEX_NAME, SHARD_NAME, SINGLE_NAME
from megatrain.models.config_json import CONFIG_NAME, MAX_CONFIG_BYTES

MAX_INDEX_BYTES = 32 << 20
MAX_SHARDS = 10_000
MAX_CARRIED_BYTES = 256 << 20
_NUMBERED = re.compile(r"-\d+-of-\d+\.safetensors$")
_SHARED_MARK = ".huggingface-shared-blobs"
_SHARED_NAME = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor and the file that holds it."""

    path: Path
    entry: TensorEntry


def read_config_bytes(folder: Path) -> bytes:
    """Return the bytes of `folder/config.json`. Raises ModelFolderError or ModelConfigError."""
    with readable(folder):
        _require_folder(folder)
        if not os.path.lexists(folder / CONFIG_NAME):
            raise ModelFolderError(
                f"{folder}: no {CONFIG_NAME}: this is not a Hugging Face model folder"
            )
        data = read_limited(resolve_file(folder, CONFIG_NAME), MAX_CONFIG_BYTES)
    if len(data) > MAX_CONFIG_BYTES:
        raise ModelConfigError(f"{CONFIG_NAME} is larger than {MAX_CONFIG_BYTES >> 20} MiB")
    return data


def read_folder(
    folder: Path, single: str = SINGLE_NAME, index: str = INDEX_NAME
) -> dict[str, StoredTensor]:
    """Return every tensor of the folder's weights, by name; `single` and `index` name their files.

    Raises ModelFolderError, WeightsFormatError or DiskError.
    """
    with readable(folder):
        _require_folder(folder)
        if (folder / single).exists():
            path = resolve_file(folder, single)
            return {e.name: StoredTensor(path=path, entry=e) for e in read_entries(path)}
        if (folder / index).exists():
            return _read_shards(folder, index)
        names = sorted(p.name for kind in ("*.bin", "*.safetensors") for p in folder.glob(kind))
    shards = [name for name in names if _NUMBERED.search(name)]
    if shards:
        hint = f" It has {listing(shards)}: fetch the index too, which says what is in them."
    elif names:
        hint = f" It has {listing(names)}, which are not supported; convert them."
    else:
        hint = ""
    raise ModelFolderError(f"{folder} has neither {single} nor {index}.{hint}")


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ModelFolderError(f"{folder} is not a folder. Give a Hugging Face model folder.")


def read_carried(folder: Path) -> dict[str, bytes]:
    """Return the files that an export takes over, by name. Raises ModelFolderError.

    A tokenizer that is a link to a private file would be published with the next export.
    """
    with readable(folder):
        names = [path.name for path in folder.iterdir() if path.exists()]
        files = {
            name: resolve_file(folder, name) for name in sorted(names) if CARRIED.fullmatch(name)
        }
        for name, path in files.items():
            if path.stat().st_size > MAX_CARRIED_BYTES:
                raise ModelFolderError(
                    f"{folder / name} is larger than {MAX_CARRIED_BYTES >> 20} MiB: refused"
                )
        return {name: path.read_bytes() for name, path in files.items()}


def read_index(folder: Path, name: str = INDEX_NAME) -> dict[str, str]:
    """Return the index's map from tensor to shard name."""
    data = read_limited(resolve_file(folder, name), MAX_INDEX_BYTES)
    if len(data) > MAX_INDEX_BYTES:
        raise WeightsFormatError(f"{name} is larger than {MAX_INDEX_BYTES >> 20} MiB")
    return parse_index(data, name)


def _read_shards(folder: Path, index: str) -> dict[str, StoredTensor]:
    wanted = read_index(folder, index)
    found: dict[str, StoredTensor] = {}
    for shard, names in _by_shard(wanted, index).items():
        path = resolve_file(folder, shard)
        for entry in read_entries(path):
            if wanted.get(entry.name) != shard:
                raise WeightsFormatError(
                    f"{shard} has tensor {entry.name[:200]!r}, but {index} disagrees"
                )
            found[entry.name] = StoredTensor(path=path, entry=entry)
        # At once: a thousand links to one large file without tensors would keep us busy.
        if absent := names - found.keys():
            raise WeightsFormatError(
                f"{index} puts {len(absent)} tensors in {shard}, which lacks them: "
                f"{listing(absent)}"
            )
    return found


def _by_shard(wanted: dict[str, str], index: str) -> dict[str, set[str]]:
    """Return each shard's tensors, shards in order."""
    shards: dict[str, set[str]] = {shard: set() for shard in sorted(set(wanted.values()))}
    if len(shards) > MAX_SHARDS:
        raise WeightsFormatError(f"{index} names {len(shards)} files; the limit is {MAX_SHARDS}")
    for tensor, shard in wanted.items():
        shards[shard].add(tensor)
    return shards


def parse_index(data: bytes, where: str = INDEX_NAME) -> dict[str, str]:
    """Return the index's map from tensor to shard name. Raises WeightsFormatError."""
    try:
        index: Any = json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise WeightsFormatError(f"{where} is not valid JSON: {str(error)[:200]}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsFormatError(f"{where} has no weight_map")
    for tensor, shard in weight_map.items():
        if len(tensor) > MAX_NAME:
            raise WeightsFormatError(
                f"{where}: the name {tensor[:80]!r}... has {len(tensor)} characters, more "
                f"than {MAX_NAME}"
            )
        if not isinstance(shard, str) or not SHARD_NAME.fullmatch(shard):
            raise WeightsFormatError(
                f"{where} puts {tensor[:200]!r} in {str(shard)[:200]!r}, "
                "which is not the plain name of a safetensors file"
            )
    return weight_map


def resolve_file(folder: Path, name: str) -> Path:
    """Return the real path of a regular file in `folder`; refuse one that leads out of it."""
    try:
        base = folder.resolve()
        path = (base / name).resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ModelFolderError(f"cannot follow {folder / name}: {error}") from error
    if not path.is_relative_to(base) and not _in_hub_cache(base, path):
        raise ModelFolderError(f"{folder / name} points outside the folder, to {path}: refused")
    if not path.exists():
        raise ModelFolderError(f"{folder / name} does not exist")
    if not path.is_file():
        raise ModelFolderError(f"{folder / name} is not a regular file: refused")
    return path


def _in_hub_cache(base: Path, path: Path) -> bool:
    """Return whether `path` is where the Hugging Face cache keeps the files of folder `base`."""
    if base.parent.name != "snapshots":
        return False
    model = base.parent.parent
    if path.is_relative_to(model / "blobs"):
        return True
    shared = model.parent / "blobs"
    return (
        model.name.startswith("models--")
        and (shared / _SHARED_MARK).is_file()
        and path.parent.parent == shared
        and bool(_SHARED_NAME.fullmatch(f"{path.parent.name}/{path.name}"))
    )


def read_limited(path: Path, most: int) -> bytes:
    """Return the bytes of a file, and at most one byte more than `most`."""
    with path.open("rb") as file:
        return file.read(most + 1)


@contextmanager
def readable(folder: Path) -> Iterator[None]:
    """Turn the system's error into ours."""
    try:
        yield
    except OSError as error:
        raise DiskError(f"cannot read {folder}: {error}") from error


def is_adapter_folder(folder: Path) -> bool:
    """Return whether a folder has adapters and no model."""
    return os.path.lexists(folder / ADAPTER_CONFIG_NAME) and not any(
        os.path.lexists(folder / name) for name in (SINGLE_NAME, INDEX_NAME)
    )
