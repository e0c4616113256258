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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megatrain.disk.direct import WriteQueue
from megatrain.disk.folder import read_index
from megatrain.disk.weights_file import NamedTensor, WeightsFile, folder_tensors
from megatrain.errors import DiskError, ModelFolderError, WeightsFormatError
from megatrain.files import make_folder, remove, rename, temporary_name, write_file
from megatrain.memory.store import Store
from megatrain.model_files import INDEX_NAME, SINGLE_NAME
from megatrain.models.decoder import Decoder
from megatrain.models.model_config import CONFIG_NAME, read_object
from megatrain.progress import Advance, byte_progress

SHARD_BYTES = 5_000_000_000


def export_weights(
    folder: Path,
    decoder: Decoder,
    store: Store,
    *,
    config_json: bytes,
    carried: Mapping[str, bytes],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the model to `folder`: shards, index, config, and the `carried` files, by name.

    Raises DiskError; the folder then still holds what it held before.
    """
    make_folder(folder)
    tensors = [tensor for _, tensor in folder_tensors(decoder, store)]
    old = _present_weights(folder)
    shards = _plan_shards(tensors, shard_bytes, taken=old)
    for name, data in {**carried, CONFIG_NAME: config_bytes(config_json, decoder)}.items():
        write_file(folder / name, data)
    total_bytes = sum(tensor.values.nbytes for tensor in tensors)
    with byte_progress(f"exporting {folder.name}", total_bytes) as advance:
        _write_weights(folder, shards, advance)
    kept = {shard.name for shard in shards} | ({INDEX_NAME} if len(shards) > 1 else set())
    for name in sorted(
        old - kept, key=lambda name: (name != SINGLE_NAME, name != INDEX_NAME, name)
    ):
        remove(folder / name)


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
    tensors: list[NamedTensor], shard_bytes: int, taken: set[str]
) -> list[WeightsFile]:
    """Return the tensors in shards of at most `shard_bytes` (or one tensor), under free names."""
    groups: list[list[NamedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.values.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.values.nbytes
    if len(groups) == 1:
        return [WeightsFile(name=SINGLE_NAME, tensors=groups[0])]
    stem = "model"
    while taken & set(shard_names(len(groups), stem)):
        stem = f"model-{secrets.token_hex(3)}"
    names = shard_names(len(groups), stem)
    return [WeightsFile(name=n, tensors=g) for n, g in zip(names, groups, strict=True)]


def shard_names(count: int, stem: str = "model") -> list[str]:
    """Return the names that readers expect of a model in `count` files."""
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def index_bytes(shards: Sequence[WeightsFile]) -> bytes:
    """Return the index that says which tensor is in which shard."""
    weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    index = {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2).encode() + b"\n"


def _write_weights(folder: Path, shards: list[WeightsFile], advance: Advance) -> None:
    """Write all shards, then make them the folder's weights by one rename."""
    written: list[Path] = []
    try:
        with WriteQueue() as carrier:
            for shard in shards:
                _write_shard(folder / shard.name, shard, carrier, advance)
                written.append(folder / shard.name)
        if len(shards) > 1:
            write_file(folder / INDEX_NAME, index_bytes(shards))
    except BaseException:
        # The failure may have come after the rename: then these are the folder's weights.
        for path in written:
            if path.name not in _present_weights(folder):
                remove(path)
        raise


def _write_shard(path: Path, shard: WeightsFile, carrier: WriteQueue, advance: Advance) -> None:
    temporary = temporary_name(path)
    with shard.fill(temporary, carrier, advance) as writer:
        writer.finish()
    try:
        rename(temporary, path)
    except BaseException:
        with suppress(DiskError):
            remove(temporary)
        raise


def config_bytes(config_json: bytes, decoder: Decoder) -> bytes:
    """Return the model's own config, saying the dtype that was written."""
    fields = read_object(config_json)
    fields.pop("torch_dtype", None)
    fields["dtype"] = str(decoder.model.dtype).removeprefix("torch.")
    return json.dumps(fields, indent=2).encode() + b"\n"
