"""The key-value cache for generation: keys and values of tokens that were already read.

The cache is transformers' own: layers that are called with it add what they compute. Only caches
of nothing but keys and values are used. What other layers keep (states of mamba and of linear
attention, convolutions) is partly in modules, which all texts share here; such models read the
full text for each token.

Texts of a cache may differ in length: each ends in the last column, shorter ones begin with columns
that nobody attends to. Positions of several axes make a text with media end at another position
than its tokens are many; what follows counts from there. Between two passes texts leave and others
join (`TextCache.of`). Their keys and values are put together by the layer that next adds to them,
so all of it happens where layers compute, and the host waits for nothing.

Laws (tests/models/test_key_values.py, tests/engine/test_sampling.py)
    1. A model generates the same text with and without a cache, alone and beside others.
    2. Nothing is cached for a model whose layers keep anything but keys and values.
    3. A cache made of rows of others has their keys and values, bit for bit, and columns for its
       longest text alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from megatrain.models.layer_call import has_cache
from megatrain.models.multimodal import text_part
from megatrain.models.probing.stand_ins import Call

ARGUMENT = "past_key_values"
_READER: Any = getattr(cache_utils, "DummyLayer", None)
"""What a cache has, from transformers 5.23 on, for a layer that reads the keys of another one."""


class Front(Protocol):
    """A template, as far as it is needed here: models/template.py."""

    @property
    def model(self) -> PreTrainedModel: ...

    def front(
        self, weights: Mapping[str, Tensor], inputs: Mapping[str, Any]
    ) -> tuple[Tensor, list[Call]]: ...


def caches_keys_and_values(template: Front) -> bool:
    """Return whether keys and values are all that the model keeps of a text."""
    model = template.model
    # Stateful: transformers' word for models of which a text cannot be read on from any place.
    takes_one = ARGUMENT in inspect.signature(type(model).forward).parameters
    if not takes_one or model._is_stateful:
        return False
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if kinds - {DynamicLayer, DynamicSlidingWindowLayer, _READER}:
        return False
    ids = torch.zeros((1, 2), dtype=torch.long)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _, calls = template.front({}, {"input_ids": ids, **TextCache(model).inputs(2)})
    return all(map(has_cache, calls))


class TextCache(DynamicCache):  # type: ignore[misc]
    """Keys and values of one or more texts that are read on together."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Return an empty cache, for texts of equal length."""
        super().__init__(config=model.config)
        self._model = model
        self.layers: list[Any] = [
            layer if type(layer) is _READER else _joining(layer) for layer in self.layers
        ]
        self._padding: list[int] = []
        """Columns before each text; empty: no text has any."""
        self._shifts: list[int] = []
        """Positions that each text is ahead of its tokens; empty: none is."""

    @classmethod
    def of(cls, parts: Sequence[tuple[TextCache, Sequence[int]]]) -> Self:
        """Return a cache of some rows of others, in order. The others are not used any more."""
        made = cls(parts[0][0]._model)
        lengths = [cache.length - cache.padding(row) for cache, rows in parts for row in rows]
        longest = max(lengths)
        if min(lengths) < longest:
            made._padding = [longest - length for length in lengths]
        if any(cache._shifts for cache, _ in parts):
            made._shifts = [cache.shift(row) for cache, rows in parts for row in rows]
        for number, layer in enumerate(made.layers):
            if type(layer) is not _READER:
                layer.take([(cache.layers[number], rows) for cache, rows in parts], longest)
        return made

    @property
    def length(self) -> int:
        """Columns: the tokens of the longest text."""
        return int(self.get_seq_length())

    def padding(self, row: int) -> int:
        """Return the number of columns before a text."""
        return self._padding[row] if self._padding else 0

    def shift(self, row: int) -> int:
        """Return how far a text's next position is ahead of the number of its tokens."""
        return self._shifts[row] if self._shifts else 0

    def read_at(self, positions: Tensor) -> None:
        """Let what follows the first texts count from their last positions. (axes, rows, tokens)"""
        self._shifts = (positions.amax(dim=(0, 2)) + 1 - positions.shape[2]).tolist()

    def inputs(self, num_new: int) -> dict[str, Any]:
        """Return what the model's forward gets besides the next `num_new` tokens of each text."""
        given: dict[str, Any] = {ARGUMENT: self, "use_cache": True}
        if not self._padding and not self._shifts:
            return given
        num_rows = len(self._padding or self._shifts)
        padding = torch.tensor([self.padding(row) for row in range(num_rows)])[:, None]
        shifts = torch.tensor([self.shift(row) for row in range(num_rows)])[:, None]
        columns = torch.arange(self.length + num_new)[None]
        given["attention_mask"] = (columns >= padding).long()
        if "position_ids" in inspect.signature(type(self._model).forward).parameters:
            given["position_ids"] = columns[:, self.length :] - padding + shifts
        return given


class _Layer(DynamicLayer):  # type: ignore[misc]
    """A layer that attends to all columns."""

    def __init__(self) -> None:
        super().__init__()
        self._length = 0
        self._taken: _Parts = []

    def take(self, parts: _Parts, length: int) -> None:
        """Begin with rows of other layers, of which the longest text has `length` tokens."""
        self._taken, self._length = parts, length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        taken, self._taken = self._taken, []
        _join(self, taken, self._length, key_states, value_states)
        self._length += key_states.shape[-2]
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return found

    def get_seq_length(self) -> int:
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self._length -= abs(tokens_to_remove)


class _Window(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A layer that attends to the last columns, and keeps no others."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self._taken: _Parts = []

    def take(self, parts: _Parts, length: int) -> None:
        """Begin with rows of other layers, of which the longest text has `length` tokens."""
        self._taken, self.cumulative_length = parts, length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        taken, self._taken = self._taken, []
        width = min(self.cumulative_length, self.sliding_window - 1)
        _join(self, taken, width, key_states, value_states)
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return found


_Parts = list[tuple[DynamicLayer, Sequence[int]]]


def _joining(layer: DynamicLayer) -> _Layer | _Window:
    if isinstance(layer, DynamicSlidingWindowLayer):
        return _Window(layer.sliding_window)
    return _Layer()


def _join(layer: DynamicLayer, parts: _Parts, width: int, keys: Tensor, values: Tensor) -> None:
    """Give a layer the last `width` columns of rows of others."""
    if not parts:
        return
    layer.lazy_initialization(keys, values)
    layer.keys = _rows([(part.keys, rows) for part, rows in parts], width)
    layer.values = _rows([(part.values, rows) for part, rows in parts], width)


def _rows(parts: Sequence[tuple[Tensor, Sequence[int]]], width: int) -> Tensor:
    """Return rows of tensors, each with its last `width` columns; columns that lack are zeros."""
    taken = []
    for tensor, rows in parts:
        lacking = width - tensor.shape[2]
        fitted = F.pad(tensor, (0, 0, lacking, 0)) if lacking > 0 else tensor[:, :, -lacking:]
        taken += [fitted[begin:end] for begin, end in _runs(rows)]
    return torch.cat(taken)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield rows as slices: an index would have to be sent to the device."""
    begin = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place] != rows[place - 1] + 1:
            yield rows[begin], rows[place - 1] + 1
            begin = place


def bytes_per_token(config: PreTrainedConfig, element_bytes: int) -> int:
    """Return at most how many bytes a token takes in a cache."""
    config = text_part(config)
    if config.is_heterogeneous:  # then its layers have their own configs
        return sum(_layer_bytes(layer, element_bytes) for layer in config.per_layer_config)
    return int(config.num_hidden_layers * _layer_bytes(config, element_bytes))


def _layer_bytes(config: PreTrainedConfig, element_bytes: int) -> int:
    heads = getattr(config, "num_attention_heads", None) or 1
    kept = getattr(config, "num_key_value_heads", None) or heads
    kept = max(kept) if isinstance(kept, list) else kept
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    key = (getattr(config, "qk_nope_head_dim", None) or 0) + (
        getattr(config, "qk_rope_head_dim", None) or 0
    )
    value = getattr(config, "v_head_dim", None) or head
    return int(kept * (max(key, head) + value) * element_bytes)
