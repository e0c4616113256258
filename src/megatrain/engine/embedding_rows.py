"""The embedding by the rows that a step needs.

A table of 128,000 tokens and width 4096 is a gigabyte of slot, and of link time, of which a step
looks at a few thousand rows. With `gather_embedding` the fetch of block 0 gathers the rows of the
step's tokens and sends those; the front looks them up by their place among them; the gradient adds
up in as many rows and is spread over the table's gradient on the host. Same bits: each row is
looked up, scaled and summed as before. Only where the head does not read the same table.

    FETCH(0)   rows of weights[0] -> device           NORM(0)   rows -> grad[0], zero elsewhere
    DRAIN(0)   their gradient -> rows on the host

Only the doors know of it: weights.py reads the rows here, gradients/ drains and spreads them.

Where compute shares the host's memory nothing is sent, but backward still makes a gradient of rows,
those of its micro-batch, and not of a table that is mostly zeros (TokenRows).

Laws (tests/engine/test_embedding_rows.py)
    1. Losses, gradients and updates are those of the full table on the device.
    2. Device memory for the table, and for its gradient, is that of the step's distinct tokens;
       backward on the host makes a gradient of the micro-batch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.devices.device import Device
from megatrain.engine.tape import HOST_GROWTH
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind
from megatrain.memory.store import Store
from megatrain.models.decoder import Decoder
from megatrain.ranks.ranks import Ranks
from megatrain.step.ops import SlotId
from megatrain.step.settings import StepSettings
from megatrain.step.shape import StepShape


def check_rows(settings: StepSettings, decoder: Decoder, device: Device, ranks: Ranks) -> None:
    """Raise ConfigError if the embedding cannot go by rows, and is to."""
    if not settings.gather_embedding:
        return
    if not device.own_memory:
        raise ConfigError("gather_embedding needs a device with its own memory")
    if not ranks.owner.is_alone:
        raise ConfigError("gather_embedding: the table is divided among ranks")
    if decoder.tied:
        raise ConfigError(
            "gather_embedding: the head of this model reads the embedding's table too, so the "
            "whole of it must be on the device"
        )


def embedding_rows(
    decoder: Decoder, store: Store, device: Device, shape: StepShape
) -> EmbeddingRows | None:
    """Return the rows as a source of weights; None: the full table is fetched."""
    return EmbeddingRows(decoder, store, device) if shape.gather_embedding else None


class EmbeddingRows:
    """Rows of the embedding, as a source of weights. Its buffers stay from step to step."""

    def __init__(self, decoder: Decoder, store: Store, device: Device) -> None:
        self._device = device
        self.name, self._padding = _table(decoder)
        self.read(store)
        self._others = {
            param.name: self._placed(store.param(param.name, TensorKind.HI))
            for param in decoder.blocks[0].params
            if param.name != self.name
        }
        self._ids = torch.empty(0, dtype=torch.long)
        self._places: list[Tensor] = []
        self._on_device: Tensor | None = None
        self._going = self._coming = torch.empty(0, dtype=torch.uint8)

    def read(self, store: Store) -> None:
        """Take rows of this store from now on. Nothing may be under way."""
        self._store = store
        self._table = store.param(self.name, TensorKind.HI)

    @property
    def num_rows(self) -> int:
        """Rows that the step needs: as many as it has distinct tokens."""
        return len(self._ids)

    @property
    def _num_bytes(self) -> int:
        return self.num_rows * self._table[0].nbytes

    def reserve(self, batch: Sequence[MicroBatch]) -> None:
        """Learn which rows a step needs, and make room for them. Nothing may be under way."""
        tokens = [micro.input_ids for micro in batch]
        self._ids = torch.unique(torch.cat([ids.reshape(-1) for ids in tokens]))
        self._places = [torch.searchsorted(self._ids, ids) for ids in tokens]
        if self._on_device is None or self._on_device.nbytes < self._num_bytes:
            device = self._device
            for arena in (self._going, self._coming):
                device.unmap_host(arena)
            self._on_device = None
            self._on_device = device.allocate(self._num_bytes, "embedding rows")
            # To pin takes time: memory of the host grows by a quarter at least, if it grows.
            num_bytes = max(self._num_bytes, int(self._going.nbytes * HOST_GROWTH))
            self._going = device.map_host(num_bytes, "embedding rows")
            self._coming = device.map_host(num_bytes, "gradients of embedding rows")

    def places(self, micro: int) -> Tensor:
        """Return, for each token of a micro-batch, its row; on the host."""
        return self._places[micro]

    def weights(self, block: int, slot: SlotId) -> dict[str, Tensor]:
        """Return the block's params as the front gets them: of the table the step's rows."""
        assert self._on_device is not None
        return {self.name: self._rows(self._on_device), **self._others}

    def fetch(self, block: int, slot: SlotId) -> int:
        """Gather the rows on the host, queue their copy, and return the bytes."""
        gather_rows(self._rows(self._going), self._table, self._ids)
        assert self._on_device is not None
        self._device.copy(self._on_device[: self._num_bytes], self._going[: self._num_bytes])
        for name, target in self._others.items():
            self._device.copy(target.view(-1), self._store.param(name, TensorKind.HI).view(-1))
        return self._num_bytes + sum(other.nbytes for other in self._others.values())

    def drained(self) -> Tensor:
        """Return the host memory for the rows' gradient, flat."""
        return self._rows(self._coming).view(-1)

    def spread(self, gradient: Tensor) -> None:
        """Make of the rows' gradient that of the table, flat. The padding token has none."""
        table = gradient.view(self._table.shape)
        spread_rows(table, self._rows(self._coming), self._ids)
        if self._padding is not None:
            table[self._padding].zero_()

    def _rows(self, flat: Tensor) -> Tensor:
        rows = flat[: self._num_bytes].view(self._table.dtype)
        return rows.view(len(self._ids), *self._table.shape[1:])

    def _placed(self, param: Tensor) -> Tensor:
        memory = self._device.allocate(param.nbytes, "weight slots")
        return memory.view(param.dtype).view(param.shape)


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """The rows of a micro-batch's tokens, as a leaf in place of the table."""

    ids: Tensor
    """Their tokens, ascending. (rows,)"""
    places: Tensor
    """The row of each token of the micro-batch. (rows of the batch, length)"""
    leaves: Mapping[str, Tensor]
    """Leaves of the block."""


class TokenRows:
    """Selects the rows that a micro-batch's backward needs, where compute reads the store."""

    def __init__(self, decoder: Decoder, device: Device) -> None:
        self.name, self._padding = _table(decoder)
        self._device = device

    def select(self, leaves: Mapping[str, Tensor], tokens: Tensor) -> SelectedRows:
        """Return the rows of `tokens` as a leaf; of the other params the leaves as they are.

        `tokens` are on the host, so that nobody waits for a device to find the distinct ones.
        """
        device = self._device
        found = torch.unique(tokens, return_inverse=True)
        ids, places = (device.to_device(device.pinned(numbers)) for numbers in found)
        rows = leaves[self.name].detach().index_select(0, ids).requires_grad_()
        return SelectedRows(ids, places, {**leaves, self.name: rows})

    def trained(self, ids: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of rows without that of the padding token."""
        if self._padding is not None:
            grad.masked_fill_((ids == self._padding)[:, None], 0)
        return grad


def _table(decoder: Decoder) -> tuple[str, int | None]:
    """Return the name of the embedding's table, and its padding token."""
    embedding = decoder.model.get_input_embeddings()
    name = next(n for n, p in decoder.model.named_parameters() if p is embedding.weight)
    return name, getattr(embedding, "padding_idx", None)


def gather_rows(target: Tensor, table: Tensor, ids: Tensor) -> None:
    """Copy rows of a table, on the host."""
    if not table.is_meta:  # a rehearsal has nothing to copy
        torch.index_select(table, 0, ids, out=target)


def spread_rows(target: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Write rows to where they belong in a table of zeros, on the host."""
    target.zero_()
    if not target.is_meta:
        target.index_copy_(0, ids, rows)
