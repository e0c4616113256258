"""The parts of a checkpoint, block by block: which tensors in which files.

    model/   an ordinary Hugging Face folder, one file per block: `from_pretrained` loads it
    state/   lo and the optimizer's states of each block that is trained, by param name

A block is the unit of saving: its files are written while its bytes are held still. It is also what
a rank would own. State that is on disk is copied from file to file in pieces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatrain.disk.hf.export import config_bytes, index_bytes, shard_names
from megatrain.disk.hf.model import HostModel
from megatrain.disk.hf.weights_file import (
    NamedTensor,
    WeightsFile,
    described_tensor,
    folder_tensors,
    state_tensor,
)
from megatrain.memory.kinds import Kind
from megatrain.memory.layout import Layout, has_kind
from megatrain.memory.store import Store
from megatrain.model_files import INDEX_NAME
from megatrain.models.config_json import CONFIG_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A checkpoint's files: those of each block, and small ones that never change in a run."""

    blocks: Sequence[Sequence[WeightsFile]]
    small: dict[str, bytes]
    model: str
    """Names the params: shapes, dtypes, and which are trained."""
    store: Store | None = None
    """Of the tensors, if it has a disk tier to fill."""

    @property
    def num_bytes(self) -> int:
        """Of all files, the manifest not counted."""
        weights = sum(file.num_bytes for files in self.blocks for file in files)
        return weights + sum(len(data) for data in self.small.values())


def checkpoint_parts(home: HostModel) -> Parts:
    """Return the files of a checkpoint, as views of the model's store."""
    store, num_blocks = home.store, len(home.decoder.blocks)
    tensors: list[list[NamedTensor]] = [[] for _ in range(num_blocks)]
    for placed, tensor in folder_tensors(home.decoder, store):
        place = store.layout.places.get(placed.param)
        # A buffer belongs to no block: it does not change.
        tensors[0 if place is None else place.segment.block].append(tensor)
    filled = [block for block in range(num_blocks) if tensors[block]]
    names = dict(zip(filled, shard_names(len(filled)), strict=True))
    blocks: list[list[WeightsFile]] = [[] for _ in range(num_blocks)]
    for block, name in names.items():
        blocks[block].append(WeightsFile(name=f"model/{name}", tensors=tensors[block]))
    index = index_bytes([WeightsFile(name=names[b], tensors=tensors[b]) for b in filled])
    for block in range(num_blocks):
        if state := _state_tensors(store, block):
            blocks[block].append(WeightsFile(name=_state_name(block), tensors=state))
    small = dict(home.carried)
    small[CONFIG_NAME] = config_bytes(home.config_json, home.decoder.model.dtype)
    small[INDEX_NAME] = index
    return Parts(
        blocks=blocks,
        small={f"model/{name}": data for name, data in sorted(small.items())},
        store=store,
        model=model_mark(store),
    )


def model_mark(store: Store) -> str:
    """Return a hash of the params and of how they are stored."""
    described = [
        (name, place.param.shape, str(place.param.dtype), place.param.trained)
        for name, place in sorted(store.layout.places.items())
    ]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:32]


def described_state(layout: Layout, block: int, states: Iterable[Kind]) -> WeightsFile:
    """Return a block's state file for an optimizer that keeps `states`; tensors have no memory."""
    places = layout.block_places(block)
    tensors = [
        described_tensor(place.param, kind)
        for kind in _in_file_order(states)
        for place in places
        if has_kind(kind, place.param.dtype, place.param.trained)
    ]
    return WeightsFile(name=_state_name(block), tensors=tensors)


def _state_name(block: int) -> str:
    return f"state/block-{block:05}.safetensors"


def _state_tensors(store: Store, block: int) -> list[NamedTensor]:
    places = store.layout.block_places(block)
    states = [kind for kind in store.kinds if kind not in (Kind.HI, Kind.LO, Kind.GRAD)]
    return [
        state_tensor(store, place.param.name, kind)
        for kind in _in_file_order(states)
        for place in places
        if place.has(kind)
    ]


def _in_file_order(states: Iterable[Kind]) -> list[Kind]:
    """Return the kinds of a state file, wider numbers first, so that all are aligned in it."""
    return sorted(
        [*states, Kind.LO], key=lambda kind: -kind.bytes_per_element() * kind.elements_per_number
    )
