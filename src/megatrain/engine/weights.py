"""Weights: the door through which compute sees the params of a block.

    FETCH(b)             weights.fetch(op)    in lane: queue the copy of the block to the device
    GATHER(b)            weights.gather(op)   comm lane: queue what other ranks have of it
    FORWARD(b, m), ...   weights.of(op)       compute lane: its params by name, in their own shapes

The store owns all weights. Compute reads each block from a source that is chosen once:

    _InStore        unified memory: the store itself, and there are no fetches
    Slots           a slot of the device, which holds a copy: losing it loses nothing. While a model
                    only generates, blocks that fit have a place of their own, and stay in it
    RestSlots       the same but for experts that come in pages (pages.py)
    EmbeddingRows   of the embedding, the rows of the step's tokens alone (embedding_rows.py)

Who waits: nothing here does. A fetch queues its copy on the stream of its lane. The schedule orders
it after the last op that reads the slot, and compute after the fetch, so no op releases a slot.
Views are valid until the next fetch into their slot: an action keeps none beyond its op.

Where ranks share the store a fetch brings this rank's part of a block into its slot, and a gather
the parts of the others.

Narrow params (megatrain/narrow.py) cross the link as they are. A slot has room for them and behind
it for their weights: the op that completes a block's bytes, a fetch or a gather, then queues what
widens them, on its own stream. In unified memory the weights of one block at a time are widened,
when compute first asks for it.

A second store with the same places, the reference, is read in place of the first while a block of
`of_reference` lasts: through the same slots, so that it takes no room on the device.

Laws (tests/engine/test_weights.py)
    1. What compute reads are the block's params, in their own shapes, without a further copy.
    2. Slots are as large as the largest block that visits them, and allocated at construction.
    3. With unified memory compute reads the store itself.
    4. A block that stays is fetched once, and read again after `leave`.
    5. A narrow param has the bits that it would have had if it had been widened at load.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.devices.device import Device
from megatrain.engine import optional
from megatrain.engine.embedding_rows import EmbeddingRows
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import Extent, Place
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.step.ops import Op, SlotId
from megatrain.step.shape import StepShape

if TYPE_CHECKING:
    from megatrain.engine.pages import ExpertPages


def check_ranks(store: Store, device: Device, ranks: Ranks) -> None:
    """Raise ConfigError for a store or a device that ranks cannot share weights with."""
    if store.layout.owner != ranks.owner:
        raise ConfigError(
            f"the store has the part of {store.layout.owner}, and the engine is {ranks.owner}"
        )
    if not ranks.owner.is_alone and not device.copying:
        raise ConfigError("ranks gather weights into slots: the device must be one that copies")


def check_reference(store: Store, reference: Store | None) -> None:
    """Raise ConfigError unless weights are in the same places of both stores."""
    if reference is not None and _weights_at(store) != _weights_at(reference):
        raise ConfigError(
            "the reference has other params than the model, or in other places: make it with "
            "clone_weights of the store"
        )


def _weights_at(store: Store) -> dict[str, tuple[Extent, int]]:
    """Return where each param's weights are, and how long the segment is that ranks divide."""
    return {
        name: (place.extent(TensorKind.HI), place.segment.num_elements)
        for name, place in store.layout.places.items()
    }


class Source(Protocol):
    """A place where compute finds blocks."""

    def fetch(self, block: int, slot: SlotId) -> int:
        """Queue the copies that bring the block to the device; return their bytes."""

    def weights(self, block: int, slot: SlotId) -> dict[str, Tensor]:
        """Return the block's params, valid until the next fetch into `slot`."""


class Weights:
    """The weights of all blocks, as compute reads them."""

    def __init__(
        self,
        decoder: Decoder,
        store: Store,
        device: Device,
        shape: StepShape,
        rows: EmbeddingRows | None,
        ranks: Ranks = ALONE,
        pages: ExpertPages | None = None,
        reference: Store | None = None,
    ) -> None:
        self._decoder, self._store, self._reference = decoder, store, reference
        self._device = device
        self._rows, self._pages = rows, pages
        self._trained = frozenset(param.name for param in decoder.params if param.trained)
        self._slots: Slots | None = None
        self._sources: list[Source]
        if device.own_memory:
            device.pin("weights", store.arena(TensorKind.HI))
            if reference is not None:
                device.pin("weights of the reference", reference.arena(TensorKind.HI))
        if shape.copying:
            by_rows = rows is not None
            slots = self._slots = (
                Slots(store, device, shape, ranks, by_rows=by_rows)
                if pages is None
                else RestSlots(store, device, shape, pages, by_rows=by_rows)
            )
            self._sources = [rows or slots, *[slots] * shape.head]
        else:
            self._sources = [_InStore(decoder, store, device)] * shape.num_blocks
        self.head_weight = decoder.owner(f"{decoder.head_path}.weight")
        """The name of the output projection. With a tied head it is the embedding's table."""
        self.head_bias = f"{decoder.head_path}.bias"

    def reserve(self, batch: Sequence[MicroBatch]) -> None:
        """Make room for what a step on `batch` reads. Nothing may be under way."""
        if self._rows is not None:
            self._rows.reserve(batch)

    @property
    def stays(self) -> bool:
        """Whether blocks stay on the device."""
        return self._slots is not None and self._slots.stays

    def slot_bytes(self, block: int) -> int:
        """Return how much room a block takes on the device; 0: none."""
        return 0 if self._slots is None else self._slots.num_bytes(block)

    def stay(self, layers: Iterable[int]) -> None:
        """Let some layers, and what else needs no more room, stay where they are fetched to.

        Nothing may be under way, and nobody may change weights until `leave`.
        """
        if self._slots is not None:
            self._slots.stay(layers)

    def leave(self) -> None:
        """Give the room of blocks that stay back. Nothing may be under way."""
        if self._slots is not None:
            self._slots.leave()

    @property
    def has_reference(self) -> bool:
        return self._reference is not None

    @contextmanager
    def of_reference(self) -> Iterator[None]:
        """Read the reference in place of the store, until the block ends. Nothing may be under way.

        Raises ConfigError while blocks of the store stay on the device.
        """
        assert self._reference is not None
        if self.stays:
            raise ConfigError("layers stay on the device: leave `engine.staying` first")
        self._read(self._reference)
        try:
            yield
        finally:
            self._read(self._store)

    def _read(self, store: Store) -> None:
        if self._slots is None:
            self._sources = [_InStore(self._decoder, store, self._device)] * len(self._sources)
            return
        self._slots.read(store)
        for part in (self._rows, self._pages):
            if part is not None:
                part.read(store)

    def fetch(self, op: Op) -> int:
        """Queue the copy of the op's block into its slot; return its bytes."""
        assert op.block is not None
        return self._sources[op.block].fetch(op.block, _slot(op))

    def gather(self, op: Op) -> int:
        """Queue the parts of other ranks into the slot of the op's block; return their bytes."""
        assert op.block is not None
        assert self._slots is not None
        return self._slots.gather(op.block, _slot(op))

    def of(self, op: Op) -> dict[str, Tensor]:
        """Return the params of the op's block. Valid until the next fetch into its slot."""
        assert op.block is not None
        return self._sources[op.block].weights(op.block, _slot(op))

    def leaves(self, op: Op) -> dict[str, Tensor]:
        """Return the params as leaves of a new graph; only trained ones want a gradient."""
        return {name: self._leaf(name, weight) for name, weight in self.of(op).items()}

    def projection(self, op: Op) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the output projection, as leaves, for an op of the head."""
        table = own = self.of(op)
        if self.head_weight not in own:
            table = self._sources[0].weights(0, op.place("fetched", 0)[1])
        weight, bias = table[self.head_weight], own.get(self.head_bias)
        return (
            self._leaf(self.head_weight, weight),
            None if bias is None else self._leaf(self.head_bias, bias),
        )

    def rows(self, micro: int) -> Tensor | None:
        """Return the row of each token of a micro-batch, on the host; None: its own number."""
        return None if self._rows is None else self._rows.places(micro)

    def _leaf(self, name: str, weight: Tensor) -> Tensor:
        return weight.detach().requires_grad_(name in self._trained)


class _InStore:
    """The store itself, where compute shares its memory."""

    def __init__(self, decoder: Decoder, store: Store, device: Device) -> None:
        self._params = [
            {
                p.name: device.in_place(store.param(p.name, TensorKind.HI))
                for p in block.params
                if not p.form
            }
            for block in decoder.blocks
        ]
        self._order = [[param.name for param in block.params] for block in decoder.blocks]
        self._wide = _WideParams(store, device, len(decoder.blocks))
        self._bytes = {
            p.name: device.in_place(store.narrow(p.name)) for p in decoder.params if p.form
        }
        size = max(map(store.layout.wide_bytes, range(len(decoder.blocks))))
        self._buffer = device.allocate(size, "weight slots") if size else None
        self._widened: int | None = None

    def fetch(self, block: int, slot: SlotId) -> int:
        raise AssertionError("with unified memory there are no fetches")

    def weights(self, block: int, slot: SlotId) -> dict[str, Tensor]:
        if self._buffer is None or not self._wide.has(block):
            return self._params[block]
        if self._widened != block:
            self._wide.widen(block, self._bytes, self._buffer)
            self._widened = block
        views = self._params[block] | self._wide.views(block, self._buffer)
        return {name: views[name] for name in self._order[block]}


class _WideParams:
    """The weights of narrow params, in a buffer that blocks visit."""

    def __init__(
        self,
        store: Store,
        device: Device,
        num_blocks: int,
        *,
        without: frozenset[str] = frozenset(),
    ) -> None:
        """Params in `without` are left out."""
        self._params = [store.layout.wide_starts(block, without) for block in range(num_blocks)]
        self._sizes = [store.layout.wide_bytes(block, without) for block in range(num_blocks)]
        if any(self._params):
            self._widener = optional.widening.Widener(device.place)
        for param, _ in itertools.chain(*self._params):
            self._widener.prepare(param.form)

    def has(self, block: int) -> bool:
        """Return whether some of the block's params are narrow."""
        return bool(self._params[block])

    def num_bytes(self, block: int) -> int:
        return self._sizes[block]

    def widen(self, block: int, narrow: Mapping[str, Tensor], buffer: Tensor) -> None:
        """Queue what makes the block's weights from their bytes, by name."""
        views = self.views(block, buffer)
        with torch.no_grad():
            for param, _ in self._params[block]:
                self._widener.widen(param.form, narrow[param.name], views[param.name].view(-1))

    def views(self, block: int, buffer: Tensor) -> dict[str, Tensor]:
        """Return the block's weights in `buffer`, each in its own shape."""
        return {
            param.name: buffer[start:][: param.num_elements * param.dtype.itemsize]
            .view(param.dtype)
            .view(param.shape)
            for param, start in self._params[block]
        }


class Slots:
    """Device buffers that blocks visit. Layers take turns; embedding and head have one each."""

    def __init__(
        self,
        store: Store,
        device: Device,
        shape: StepShape,
        ranks: Ranks = ALONE,
        *,
        by_rows: bool = False,
    ) -> None:
        """`by_rows`: the embedding needs no slot, its rows have their own memory."""
        self._store = store
        self._device = device
        self._ranks = ranks
        self._wide = self._wide_params(shape.num_blocks)
        sizes = [self.num_bytes(block) for block in range(shape.num_blocks)]
        largest = max(sizes[layer] for layer in shape.layers)
        needed: dict[SlotId, int] = dict.fromkeys(range(shape.slots), largest)
        if not by_rows:
            needed["embedding"] = sizes[0]
        needed["head"] = sizes[shape.head]
        self._buffers = {
            slot: device.allocate(size, "weight slots") for slot, size in needed.items()
        }
        self._views: dict[tuple[SlotId, int], dict[str, Tensor]] = {}
        self._alone: dict[int, SlotId] = {
            block: slot
            for block, slot in ((0, "embedding"), (shape.head, "head"))
            if slot in needed
        }
        """Blocks whose slot no other visits."""
        self._staying: dict[int, Tensor] = {}
        self._fetched: set[int] = set()
        self._gathered: set[int] = set()
        """Blocks that stay and are there: our part of them, and those of others."""

    def _wide_params(self, num_blocks: int) -> _WideParams:
        return _WideParams(self._store, self._device, num_blocks)

    def read(self, store: Store) -> None:
        """Fetch from this store from now on."""
        self._store = store

    def num_bytes(self, block: int) -> int:
        """Return the room that a block needs, with its narrow params and their weights."""
        return self._store.layout.gathered_bytes(block) + self._wide.num_bytes(block)

    @property
    def stays(self) -> bool:
        return bool(self._staying)

    def stay(self, layers: Iterable[int]) -> None:
        """Give layers a place of their own; blocks that have one stay too."""
        self._views = {}
        self._staying = {block: self._buffers[slot] for block, slot in self._alone.items()}
        for layer in layers:
            size = self.num_bytes(layer)
            self._staying[layer] = self._device.allocate(size, "layers that stay")

    def leave(self) -> None:
        """Let every block visit its slot again."""
        self._views, self._staying = {}, {}
        self._fetched.clear()
        self._gathered.clear()

    def fetch(self, block: int, slot: SlotId) -> int:
        if _is_there(block, self._staying, self._fetched):
            return 0
        buffer, num_bytes = self._buffer(block, slot), 0
        for segment, start in self._store.layout.gathered_starts(block):
            source = self._store.segment(segment, TensorKind.HI).view(torch.uint8)
            start += segment.owned.start * segment.dtype.itemsize
            self._device.copy(buffer[start : start + source.nbytes], source)
            num_bytes += source.nbytes
        if self._ranks.owner.is_alone:
            self._widen(block, buffer)
        return num_bytes

    def gather(self, block: int, slot: SlotId) -> int:
        """Queue what brings the parts of other ranks; return their bytes."""
        if _is_there(block, self._staying, self._gathered):
            return 0
        buffer, num_bytes = self._buffer(block, slot), 0
        for segment, start in self._store.layout.gathered_starts(block):
            size = segment.gathered_elements * segment.dtype.itemsize
            parts = buffer[start : start + size]
            self._device.communicate([parts], [parts], partial(self._ranks.wire.gather, parts))
            num_bytes += size - size // self._ranks.owner.size
        self._widen(block, buffer)
        return num_bytes

    def _widen(self, block: int, buffer: Tensor) -> None:
        """Queue what makes weights of the narrow params that are in a buffer."""
        if self._wide.has(block):
            narrow = self._store.layout.gathered_params(block, buffer)
            self._wide.widen(block, narrow, self._behind(block, buffer))

    def _behind(self, block: int, buffer: Tensor) -> Tensor:
        return buffer[self._store.layout.gathered_bytes(block) :]

    def weights(self, block: int, slot: SlotId) -> dict[str, Tensor]:
        views = self._views.get((slot, block))
        if views is None:
            buffer = self._buffer(block, slot)
            views = self._params(block, buffer)
            views |= self._wide.views(block, self._behind(block, buffer))
            self._views[slot, block] = views
        return views

    def _params(self, block: int, buffer: Tensor) -> dict[str, Tensor]:
        return self._store.layout.gathered_params(block, buffer)

    def _buffer(self, block: int, slot: SlotId) -> Tensor:
        return self._staying.get(block, self._buffers[slot])


class RestSlots(Slots):
    """Slots for all of a block but its experts, which come in pages and have stand-ins here."""

    def __init__(
        self,
        store: Store,
        device: Device,
        shape: StepShape,
        pages: ExpertPages,
        *,
        by_rows: bool = False,
    ) -> None:
        self._pages = pages
        super().__init__(store, device, shape, by_rows=by_rows)

    def _wide_params(self, num_blocks: int) -> _WideParams:
        return _WideParams(self._store, self._device, num_blocks, without=self._pages.names)

    def fetch(self, block: int, slot: SlotId) -> int:
        if _is_there(block, self._staying, self._fetched):
            return 0
        buffer, num_bytes = self._buffer(block, slot), 0
        for place, start in self._starts(block):
            source = self._store.home(place.param.name)
            self._device.copy(buffer[start : start + source.nbytes], source)
            num_bytes += source.nbytes
        self._widen(block, buffer)
        return num_bytes

    def num_bytes(self, block: int) -> int:
        return self._rest_bytes(block) + self._wide.num_bytes(block)

    def _widen(self, block: int, buffer: Tensor) -> None:
        if self._wide.has(block):
            narrow = {place.param.name: buffer[start:] for place, start in self._starts(block)}
            self._wide.widen(block, narrow, self._behind(block, buffer))

    def _behind(self, block: int, buffer: Tensor) -> Tensor:
        return buffer[self._rest_bytes(block) :]

    def _params(self, block: int, buffer: Tensor) -> dict[str, Tensor]:
        starts = {place.param.name: start for place, start in self._starts(block)}
        views = {}
        for place in self._store.layout.block_places(block):
            param = place.param
            if param.name in self._pages.names:
                views[param.name] = self._pages.stand_in(param.name)
            elif not param.form:
                start = starts[param.name]
                flat = buffer[start : start + param.num_elements * param.dtype.itemsize]
                views[param.name] = flat.view(param.dtype).view(param.shape)
        return views

    def _rest_bytes(self, block: int) -> int:
        return sum(_padded_bytes(place) for place, _ in self._starts(block))

    def _starts(self, block: int) -> list[tuple[Place, int]]:
        """Return the params that the slot has, and their first bytes there."""
        found, start = [], 0
        for place in self._store.layout.block_places(block):
            if place.param.name not in self._pages.names:
                found.append((place, start))
                start += _padded_bytes(place)
        return found


def _slot(op: Op) -> SlotId:
    """Return the slot of the op's block, which is its own number where compute reads the store."""
    return op.place("fetched")[1]


def _padded_bytes(place: Place) -> int:
    return (place.padded_stop - place.start) * place.param.stored_dtype.itemsize


def _is_there(block: int, staying: Container[int], there: set[int]) -> bool:
    """Return whether a block that stays has come before; if not, it comes now."""
    if block not in staying:
        return False
    came = block in there
    there.add(block)
    return came
