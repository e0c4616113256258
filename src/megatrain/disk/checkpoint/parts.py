"""The parts of a checkpoint, block by block: which tensors in which files.

    model/   an ordinary Hugging Face folder, one file per block: `from_pretrained` loads it.
             Of a joint model one file more, with what it carries (disk/hf/multimodal_tensors.py)
    state/   lo and the optimizer's states of each block that is trained, by param name

Of a model with adapters, model/ has these alone, a file per block, and what PEFT calls them; the
base is named, and not copied: nothing changes it.

A block is the unit of saving: its files are written while its bytes are held still. State that is
on disk is copied from file to file in pieces. Ranks that share a store name the same files, of
which each has its part of every tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatrain.disk import optional
from megatrain.disk.hf.export import config_bytes, index_bytes, shard_names
from megatrain.disk.hf.model import HostModel
from megatrain.disk.hf.names import FolderTensor
from megatrain.disk.hf.narrowed import recording
from megatrain.disk.hf.weights_file import (
    NamedTensor,
    WeightsFile,
    described_tensor,
    folder_tensors,
    placed_tensors,
    state_tensor,
)
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import Layout, has_kind
from megatrain.memory.store import Store
from megatrain.model_files import ADAPTER_INDEX_NAME, INDEX_NAME
from megatrain.models.config_json import CONFIG_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A checkpoint's files: those of each block, and small ones that never change in a run."""

    blocks: Sequence[Sequence[WeightsFile]]
    carried: Sequence[WeightsFile] = ()
    """Tensors that never change and are not in memory: they are copied from the source."""
    small: dict[str, bytes]
    model: str
    """Names the params: shapes, dtypes, and which are trained."""
    store: Store | None = None
    """The store of the tensors, if it has a disk tier to fill."""

    @property
    def files(self) -> dict[str, WeightsFile]:
        """All files with tensors, by name."""
        files = [*(file for files in self.blocks for file in files), *self.carried]
        return {file.name: file for file in files}

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        weights = sum(file.num_bytes for file in self.files.values())
        return weights + sum(len(data) for data in self.small.values())


def checkpoint_parts(home: HostModel) -> Parts:
    """Return the files of a checkpoint, as views of the model's store."""
    store, num_blocks = home.store, len(home.decoder.blocks)
    adapted = home.decoder.adapters is not None
    stem, index_name = ("adapter_model", ADAPTER_INDEX_NAME) if adapted else ("model", INDEX_NAME)
    tensors: list[list[NamedTensor]] = [[] for _ in range(num_blocks)]
    for placed, tensor in _model_tensors(home):
        place = store.layout.places.get(placed.param)
        # A buffer belongs to no block: it does not change.
        tensors[0 if place is None else place.segment.block].append(tensor)
    filled = [block for block in range(num_blocks) if tensors[block]]
    copied = [] if adapted else home.beside
    shards = shard_names(len(filled) + bool(copied), stem)
    names = dict(zip(filled, shards, strict=False))
    blocks: list[list[WeightsFile]] = [[] for _ in range(num_blocks)]
    for block, name in names.items():
        blocks[block].append(WeightsFile(name=f"model/{name}", tensors=tensors[block]))
    weights = [WeightsFile(name=names[block], tensors=tensors[block]) for block in filled]
    beside = [WeightsFile(name=shards[-1], tensors=copied)] if copied else []
    index = index_bytes([*weights, *beside])
    for block in range(num_blocks):
        if state := _state_tensors(store, block):
            blocks[block].append(WeightsFile(name=_state_name(block), tensors=state))
    small = {**_small_files(home), index_name: index}
    return Parts(
        blocks=blocks,
        carried=[WeightsFile(name=f"model/{f.name}", tensors=f.tensors) for f in beside],
        small={f"model/{name}": data for name, data in sorted(small.items())},
        store=store,
        model=model_mark(store),
    )


def _model_tensors(home: HostModel) -> list[tuple[FolderTensor, NamedTensor]]:
    if home.decoder.adapters is None:
        return folder_tensors(home.decoder, home.store)
    return placed_tensors(optional.names.adapter_tensors(home.decoder), home.decoder, home.store)


def _small_files(home: HostModel) -> dict[str, bytes]:
    if home.decoder.adapters is not None:
        config = recording(home.config_json, home.form)
        return optional.export.adapter_files(home.decoder, home.weights, config, home.carried)
    config = config_bytes(home.config_json, home.decoder.model.dtype)
    return {**home.carried, CONFIG_NAME: config}


def model_mark(store: Store) -> str:
    """Return a hash of the params and of how they are stored."""
    described = [
        (name, place.param.shape, str(place.param.dtype), place.param.trained)
        for name, place in sorted(store.layout.places.items())
    ]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:32]


def described_state(layout: Layout, block: int, states: Iterable[TensorKind]) -> WeightsFile:
    """Return a block's state file for an optimizer that keeps `states`; tensors have no memory."""
    places = layout.block_places(block)
    tensors = [
        described_tensor(place.param, kind)
        for kind in _in_file_order(states)
        for place in places
        if has_kind(
            kind,
            place.param.dtype,
            trained=place.param.trained,
            matrices=place.segment.matrices,
        )
    ]
    return WeightsFile(name=_state_name(block), tensors=tensors)


def _state_name(block: int) -> str:
    return f"state/block-{block:05}.safetensors"


def _state_tensors(store: Store, block: int) -> list[NamedTensor]:
    places = store.layout.block_places(block)
    states = [
        kind for kind in store.kinds if kind not in (TensorKind.HI, TensorKind.LO, TensorKind.GRAD)
    ]
    return [
        state_tensor(store, place.param.name, kind)
        for kind in _in_file_order(states)
        for place in places
        if place.has(kind)
    ]


def _in_file_order(states: Iterable[TensorKind]) -> list[TensorKind]:
    """Return the kinds of a state file, wider numbers first, so that all are aligned in it."""
    return sorted(
        [*states, TensorKind.LO],
        key=lambda kind: -kind.bytes_per_element() * kind.elements_per_number,
    )
