"""From the store to a Hugging Face folder that others can load, written straight from `hi`.

An export is safe at every instant, also over the folder the model was loaded from. Readers find
weights by one name: `model.safetensors` if it is there, else the index. New shards get names that
no file in the folder has: until that one name is put in place by a rename the old export is whole,
after it the new one. Only then are the old shards removed.

Laws (tests/disk/test_export.py)
    1. `from_pretrained` of an export has every bit of `hi`.
    2. A failure at any call leaves the old export or the new one, never a mixture.
    3. Peak memory grows by the writer's buffers, not by the model.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatrain.disk.files import (
    DirectWriter,
    make_folder,
    remove,
    rename,
    temporary_name,
    write_file,
)
from megatrain.disk.folder import INDEX_NAME, SINGLE_NAME, carried_files, read_index
from megatrain.disk.names import FolderTensor, NameMap
from megatrain.disk.safetensors_format import format_header
from megatrain.errors import ModelFolderError, WeightsFormatError
from megatrain.memory.layout import Kind
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder
from megatrain.models.model_config import CONFIG_NAME, read_object
from megatrain.progress import Advance, byte_progress

SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    name: str
    tensors: tuple[tuple[FolderTensor, Tensor], ...]


def export_weights(
    folder: Path,
    decoder: Decoder,
    store: Store,
    *,
    config_json: bytes,
    carry_from: Path,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the model to `folder`: shards, index, config, and what `carry_from` has beside them.

    Raises DiskError; the folder then still holds what it held before.
    """
    make_folder(folder)
    tensors = _tensors(decoder, store)
    old = _present_weights(folder)
    shards = _plan_shards(tensors, shard_bytes, taken=old)
    _carry_files(carry_from, folder)
    write_file(folder / CONFIG_NAME, _config_bytes(config_json, decoder))
    total_bytes = sum(values.nbytes for _, values in tensors)
    with byte_progress(f"exporting {folder.name}", total_bytes) as advance:
        _write_weights(folder, shards, total_bytes, advance)
    kept = {shard.name for shard in shards} | ({INDEX_NAME} if len(shards) > 1 else set())
    for name in sorted(
        old - kept, key=lambda name: (name != SINGLE_NAME, name != INDEX_NAME, name)
    ):
        remove(folder / name)


def _tensors(decoder: Decoder, store: Store) -> list[tuple[FolderTensor, Tensor]]:
    """Return the folder's tensors and their values: views of the store, no copies."""
    buffers = decoder.persistent_buffers()
    result = []
    for tensor in NameMap(decoder).tensors.values():
        source = buffers.get(tensor.param)
        if source is None:
            source = store.param(tensor.param, Kind.HI)
        values = source.reshape(-1)[tensor.start : tensor.start + tensor.num_elements]
        result.append((tensor, values))
    return result


def _present_weights(folder: Path) -> set[str]:
    """Return the names of weight files that a reader of `folder` would use now."""
    names = {name for name in (SINGLE_NAME, INDEX_NAME) if (folder / name).exists()}
    if INDEX_NAME in names:
        try:
            shards = set(read_index(folder).values())
        except (ModelFolderError, WeightsFormatError):
            shards = set()  # no reader could use it; it is about to be replaced
        names |= {shard for shard in shards if (folder / shard).exists()}
    return names


def _plan_shards(
    tensors: list[tuple[FolderTensor, Tensor]], shard_bytes: int, taken: set[str]
) -> list[_Shard]:
    """Return the tensors in shards of at most `shard_bytes` (or one tensor), under free names."""
    groups: list[list[tuple[FolderTensor, Tensor]]] = [[]]
    size = 0
    for item in tensors:
        if groups[-1] and size + item[1].nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item[1].nbytes
    if len(groups) == 1:
        return [_Shard(name=SINGLE_NAME, tensors=tuple(groups[0]))]
    stem = "model"
    while True:
        names = [
            f"{stem}-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)
        ]
        if not taken & set(names):
            break
        stem = f"model-{secrets.token_hex(3)}"
    return [_Shard(name=n, tensors=tuple(g)) for n, g in zip(names, groups, strict=True)]


def _write_weights(folder: Path, shards: list[_Shard], total_bytes: int, advance: Advance) -> None:
    """Write all shards, then make them the folder's weights by one rename."""
    if len(shards) == 1:
        _write_shard(folder / SINGLE_NAME, shards[0], advance)
        return
    written: list[Path] = []
    try:
        for shard in shards:
            _write_shard(folder / shard.name, shard, advance)
            written.append(folder / shard.name)
        weight_map = {tensor.name: shard.name for shard in shards for tensor, _ in shard.tensors}
        index = {
            "metadata": {"total_size": total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_file(folder / INDEX_NAME, json.dumps(index, indent=2).encode() + b"\n")
    except BaseException:
        # The failure may have come after the rename: then these are the folder's weights.
        for path in written:
            if path.name not in _present_weights(folder):
                remove(path)
        raise


def _write_shard(path: Path, shard: _Shard, advance: Advance) -> None:
    header, data_bytes = format_header((t.name, v.dtype, t.shape) for t, v in shard.tensors)
    temporary = temporary_name(path)
    with DirectWriter(temporary, len(header) + data_bytes) as writer:
        writer.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for _, values in shard.tensors:
            writer.write(values.view(torch.uint8))
            advance(values.nbytes)
        writer.finish()
    try:
        rename(temporary, path)
    finally:
        remove(temporary)


def _config_bytes(config_json: bytes, decoder: Decoder) -> bytes:
    """Return the model's own config, saying the dtype that was written."""
    fields = read_object(config_json)
    fields.pop("torch_dtype", None)
    fields["dtype"] = str(decoder.model.dtype).removeprefix("torch.")
    return json.dumps(fields, indent=2).encode() + b"\n"


def _carry_files(source: Path, target: Path) -> None:
    """Copy the tokenizer and generation files, unless they are there already."""
    if source.resolve() == target.resolve() or not source.is_dir():
        return
    for name, path in carried_files(source).items():
        write_file(target / name, path.read_bytes())
