"""Export: the store's `hi` weights written to a Hugging Face folder that others can load.

A new export is written beside its place and appears there by one rename, complete.

An export over an older one is safe at every instant, also over the folder the model was loaded
from. Readers find weights by one name: `model.safetensors` if it is there, else the index. New
shards get names that no file in the folder has: until that one name is put in place by a rename the
old export is complete, after it the new one. Only then are the old shards removed. The record of a
run's export (exported.py) is removed first and written last.

Ranks that share a store export together: the first one writes, the others send it their parts
(joint_files.py), so that none has the model whole.

Laws (tests/disk/hf/test_export.py, tests/disk/hf/test_export_ranks.py)
    1. `from_pretrained` of an export has every bit of `hi`.
    2. A failure at any call leaves the old export or the new one, never a mixture; where there was
       none, none or all of it.
    3. Peak memory grows by the writer's buffers, not by the model.
    4. The bytes do not depend on how many ranks have the model, and all ranks end alike.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.disk.checkpoint.manifest import FileRecord
from megatrain.disk.hf.exported import RECORD_NAME, ExportRecord
from megatrain.disk.hf.folder import read_index
from megatrain.disk.hf.joint_files import JointFiles
from megatrain.disk.hf.weights_file import NamedTensor, WeightsFile
from megatrain.errors import DiskError, ModelFolderError, WeightsFormatError
from megatrain.files import (
    clear_remains,
    make_folder,
    remove,
    remove_folder,
    rename,
    sync_folder,
    temporary_name,
    write_file,
)
from megatrain.memory.direct import DirectWriter, WriteQueue
from megatrain.model_files import ADAPTER_CONFIG_NAME, ADAPTER_NAME, INDEX_NAME, SINGLE_NAME
from megatrain.models.config_json import read_object
from megatrain.progress import byte_progress
from megatrain.ranks.agreement import Agreement
from megatrain.ranks.ranks import ALONE, Ranks

SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Which model of a run is exported."""

    step: int
    best_loss: float | None = None
    """The loss of its evaluation, if it is the best model of the run."""


def write_tensors(
    folder: Path,
    tensors: list[NamedTensor],
    small: Mapping[str, bytes],
    *,
    single: str = SINGLE_NAME,
    shard_bytes: int = SHARD_BYTES,
    origin: Origin | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Write tensors to `folder`, in one file named `single` or in shards, and `small` files.

    With an `origin` the folder also gets a record of it. All ranks call it alike, and only the
    first touches the folder. Raises DiskError; the folder is then unchanged.
    """
    total_bytes = sum(tensor.num_bytes for tensor in tensors)
    title = f"exporting {folder.name}"
    with (
        Agreement(ranks.carrier.agree) as agreement,
        byte_progress(title, total_bytes, shown=ranks.leads) as advance,
        WriteQueue() as queue,
    ):
        together = _Together(joint=JointFiles(ranks, queue, advance), agreement=agreement)

        def write(place: Path) -> None:
            old = _present_weights(place)
            shards = _plan_shards(tensors, shard_bytes, taken=old, single=single)
            _export(place, shards, small, old, origin, together)

        if not ranks.leads:
            for shard in _plan_shards(tensors, shard_bytes, taken=set(), single=single):
                together.write(shard, folder)
        elif folder.is_dir() and any(folder.iterdir()):
            write(folder)
        else:
            _appear_whole(folder, write)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Together:
    """Shards of all ranks' parts, written by the first."""

    joint: JointFiles
    agreement: Agreement

    def write(self, shard: WeightsFile, path: Path) -> DirectWriter | None:
        """Do what `JointFiles.write` does, unless a rank has failed: then all raise."""
        self.agreement.settle()
        writer = self.joint.write(shard, path, rank=0)
        try:
            self.agreement.settle(self.joint.failure)
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise
        return writer


def _appear_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a folder beside the place, then give it the name."""
    folder = folder.resolve()  # a link stays, and leads to it
    beside = temporary_name(folder)
    clear_remains(folder.parent, folder.name)
    try:
        make_folder(beside)
        write(beside)
        rename(beside, folder)
    except BaseException:
        with suppress(DiskError):  # the first failure is the one to report
            remove_folder(beside)
        raise


def _export(
    folder: Path,
    shards: list[WeightsFile],
    small: Mapping[str, bytes],
    old: set[str],
    origin: Origin | None,
    together: _Together,
) -> None:
    if (folder / RECORD_NAME).exists():
        remove(folder / RECORD_NAME)
        sync_folder(folder)
    for name, data in small.items():
        write_file(folder / name, data)
    records = _write_weights(folder, shards, together)
    kept = {shard.name for shard in shards} | set(small)
    kept |= {INDEX_NAME} if len(shards) > 1 else set()
    for name in sorted(
        old - kept, key=lambda name: (name != SINGLE_NAME, name != INDEX_NAME, name)
    ):
        remove(folder / name)
    if origin is not None:
        records |= {name: FileRecord.of_bytes(data) for name, data in small.items()}
        about = ExportRecord(step=origin.step, best_loss=origin.best_loss, files=records)
        write_file(folder / RECORD_NAME, about.to_bytes())


def _present_weights(folder: Path) -> set[str]:
    """Return the names of weight files that a reader of `folder` would use now."""
    read = (SINGLE_NAME, INDEX_NAME, ADAPTER_NAME, ADAPTER_CONFIG_NAME)
    names = {name for name in read if (folder / name).exists()}
    if INDEX_NAME in names:
        try:
            shards = set(read_index(folder).values())
        except (ModelFolderError, WeightsFormatError):
            shards = set()  # no reader could use it; it is about to be replaced
        names |= {shard for shard in shards if (folder / shard).exists()}
    return names


def _plan_shards(
    tensors: list[NamedTensor], shard_bytes: int, taken: set[str], single: str
) -> list[WeightsFile]:
    """Return the tensors in shards of at most `shard_bytes` (or one tensor), under free names."""
    groups: list[list[NamedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.num_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    if len(groups) == 1:
        return [WeightsFile(name=single, tensors=groups[0])]
    stem = "model"
    while taken & set(shard_names(len(groups), stem)):
        stem = f"model-{secrets.token_hex(3)}"
    names = shard_names(len(groups), stem)
    return [WeightsFile(name=n, tensors=g) for n, g in zip(names, groups, strict=True)]


def shard_names(count: int, stem: str = "model") -> list[str]:
    """Return the names that readers expect of a model in `count` files."""
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def index_bytes(shards: Sequence[WeightsFile]) -> bytes:
    """Return the index from tensors to shards."""
    weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    index = {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2).encode() + b"\n"


def _write_weights(
    folder: Path, shards: list[WeightsFile], together: _Together
) -> dict[str, FileRecord]:
    """Write all shards, then make them the folder's weights by one rename; return their records."""
    records: dict[str, FileRecord] = {}
    try:
        for shard in shards:
            records[shard.name] = _write_shard(folder, shard, together)
        if len(shards) > 1:
            index = index_bytes(shards)
            write_file(folder / INDEX_NAME, index)
            records[INDEX_NAME] = FileRecord.of_bytes(index)
    except BaseException:
        # The failure may have come after the rename: then these are the folder's weights.
        for name in records:
            if name not in _present_weights(folder):
                remove(folder / name)
        raise
    return records


def _write_shard(folder: Path, shard: WeightsFile, together: _Together) -> FileRecord:
    temporary = temporary_name(folder / shard.name)
    writer = together.write(shard, temporary)
    assert writer is not None
    with writer:
        writer.finish()
    try:
        rename(temporary, folder / shard.name)
    except BaseException:
        with suppress(DiskError):
            remove(temporary)
        raise
    return FileRecord.of_digests(shard.num_bytes, writer.digests)


def config_bytes(config_json: bytes, dtype: torch.dtype) -> bytes:
    """Return the model's own config, saying the dtype that was written."""
    fields = read_object(config_json)
    fields.pop("torch_dtype", None)
    fields["dtype"] = str(dtype).removeprefix("torch.")
    return json.dumps(fields, indent=2).encode() + b"\n"
