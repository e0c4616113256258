"""New tokens: more rows in the embedding tables that the vocabulary indexes.

Tables are the embedding, the output projection and its bias. Folders often have more rows than
their tokenizer has tokens; new tokens take those first, and tables grow only beyond them. The row
of a new token is the mean of the rows of all tokens before it, so that the model starts out neither
expecting nor excluding it. All other rows keep every bit.

Laws (tests/disk/hf/test_growth.py)
    1. The master of each new row is the mean, in fp32, of the rows of the old tokens.
    2. No other row changes; a tied table grows once.
    3. The bits of a row do not depend on how ranks share its table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import overlap
from megatrain.memory.master import split_into
from megatrain.memory.store import Store
from megatrain.models.config_json import read_object
from megatrain.models.decoder import Decoder

if TYPE_CHECKING:
    from megatrain.disk.hf.names import FolderTensor


class StoredRows(Protocol):
    """The rows of a table in a folder."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Tensor:
        """Return rows in fp32."""


_ROWS = 4096
"""Rows of a table whose masters exist at a time."""
_STALE = frozenset({"added_tokens.json", "special_tokens_map.json"})
"""Files that a saved tokenizer replaces even where it has no such file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """New tokens of a model."""

    num_tokens: int
    """Tokens that the tokenizer had: rows beyond them are spare."""
    new_ids: tuple[int, ...]
    files: Mapping[str, bytes]
    """The files of the tokenizer with the new tokens, by name."""

    def config(self, config_json: bytes) -> bytes:
        """Return a config.json with room for all tokens."""
        fields = read_object(config_json)
        if "text_config" in fields:
            raise ConfigError(
                "model.add_tokens: the vocabulary of a joint model also has the tokens that stand "
                "for images and sound, so it cannot grow here. Remove model.add_tokens."
            )
        size = fields.get("vocab_size")
        if isinstance(size, int) and size > max(self.new_ids):
            return config_json
        fields["vocab_size"] = max(self.new_ids) + 1
        return json.dumps(fields, indent=2).encode() + b"\n"

    def carried(self, carried: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return what goes with the model, with the new tokenizer in place of the old."""
        kept = {name: data for name, data in carried.items() if name not in _STALE}
        return {**kept, **self.files}

    def check(self, decoder: Decoder) -> None:
        """Raise ConfigError if a table that gets new rows is not trained."""
        params = {param.name: param for param in decoder.params}
        for name in tables(decoder):
            if not params[name].trained:
                raise ConfigError(
                    f"model.add_tokens gives {name} new rows, but it is not trained (model.frozen, "
                    "or lora without it in lora.modules_to_save), so the model would never learn "
                    "the tokens. Remove one of the two."
                )

    def narrowed(self, decoder: Decoder, tensor: FolderTensor, rows: int) -> FolderTensor:
        """Return a table as a folder has it that is older than the new tokens."""
        if tensor.param not in tables(decoder) or not 0 < rows < tensor.shape[0]:
            return tensor
        width = tensor.num_elements // tensor.shape[0]
        return replace(tensor, shape=(rows, *tensor.shape[1:]), num_elements=rows * width)

    def fill(self, decoder: Decoder, store: Store, rows_of: Callable[[str], StoredRows]) -> None:
        """Give the new tokens their rows; the store has those that the folder has.

        `rows_of` has those of the folder, by table. Raises DiskError.
        """
        for name in tables(decoder):
            place, stored = store.layout.places[name], rows_of(name)
            rows = sorted({*self.new_ids, *range(len(stored), place.param.shape[0])})
            width = math.prod(place.param.shape[1:])
            spans = [overlap(range(row * width, (row + 1) * width), place.owned) for row in rows]
            if not any(spans):
                continue
            hi, split = store.param(name, TensorKind.HI).view(-1), place.has(TensorKind.LO)
            mean = _mean(stored, min(self.num_tokens, len(stored)), None if split else hi.dtype)
            with (
                store.changing(place.segment.block, TensorKind.LO)
                if split
                else nullcontext() as region
            ):
                lo = store.param(name, TensorKind.LO, region).view(-1) if split else None
                for row, span in zip(rows, spans, strict=True):
                    values = mean[span.start - row * width : span.stop - row * width]
                    here = slice(span.start - place.owned.start, span.stop - place.owned.start)
                    if lo is None:
                        hi[here] = values
                    elif span:
                        split_into(values, hi[here], lo[here])


def tables(decoder: Decoder) -> list[str]:
    """Return the params that have a row for each token."""
    model = decoder.model
    table = model.get_input_embeddings().weight
    names = [next(name for name, param in model.named_parameters() if param is table)]
    head = decoder.owner(f"{decoder.head_path}.weight")
    bias = f"{decoder.head_path}.bias"
    owned = {param.name for param in decoder.params}
    return list(dict.fromkeys([*names, head, *([bias] if bias in owned else [])]))


def _mean(stored: StoredRows, count: int, kept: torch.dtype | None) -> Tensor:
    """Return the mean of the masters of the first `count` rows, in fp32, flat.

    `kept` is their dtype in a store that has no remainders, which rounds them.
    """
    total: Tensor | float = 0.0
    for start in range(0, count, _ROWS):
        master = stored[start : min(start + _ROWS, count)]
        master = master if kept is None else master.to(kept).float()
        total = total + master.double().sum(0, keepdim=True)
    assert isinstance(total, Tensor), "no token is old"
    return (total / count).float().view(-1)
