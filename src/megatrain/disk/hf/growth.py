"""New tokens: more rows in the embedding tables that the vocabulary indexes.

Tables are the embedding, the output projection and its bias. Folders often have more rows than
their tokenizer has tokens; new tokens take those first, and tables grow only beyond them. The row
of a new token is the mean of the rows of all tokens before it, so that the model starts out neither
expecting nor excluding it. All other rows keep every bit.

Laws (tests/disk/hf/test_growth.py)
    1. The master of each new row is the mean, in fp32, of the rows of the old tokens.
    2. No other row changes; a tied table grows once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.memory.kinds import Kind
from megatrain.memory.master import join, split_into
from megatrain.memory.store import Store
from megatrain.models.config_json import read_object
from megatrain.models.decoder import Decoder

if TYPE_CHECKING:
    from megatrain.disk.hf.names import FolderTensor

_ROWS = 4096
"""Rows of a table whose masters exist at a time."""
_STALE = frozenset({"added_tokens.json", "special_tokens_map.json"})
"""What a saved tokenizer replaces even where it has no such file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """New tokens of a model."""

    num_tokens: int
    """Tokens that the tokenizer had: rows beyond them are spare."""
    new_ids: tuple[int, ...]
    files: Mapping[str, bytes]
    """Of the tokenizer with the new tokens, by name."""

    def config(self, config_json: bytes) -> bytes:
        """Return a config.json with room for all tokens."""
        fields = read_object(config_json)
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
                    f"model.add_tokens gives {name} new rows, but model.frozen keeps it from "
                    "training, so the model would never learn the tokens. Remove one of the two."
                )

    def narrowed(self, decoder: Decoder, tensor: FolderTensor, rows: int) -> FolderTensor:
        """Return a table as a folder has it that is older than the new tokens."""
        if tensor.param not in tables(decoder) or not 0 < rows < tensor.shape[0]:
            return tensor
        width = tensor.num_elements // tensor.shape[0]
        return replace(tensor, shape=(rows, *tensor.shape[1:]), num_elements=rows * width)

    def fill(self, decoder: Decoder, store: Store, num_rows: int) -> None:
        """Give the new tokens their rows; the folder has filled the first `num_rows`."""
        for name in tables(decoder):
            hi, place = store.param(name, Kind.HI), store.layout.places[name]
            rows = {*self.new_ids, *range(num_rows, len(hi))}
            num_old = min(self.num_tokens, num_rows)
            if not place.has(Kind.LO):
                hi[sorted(rows)] = _mean(hi, None, num_old)
                continue
            with store.changing(place.segment.block, Kind.LO) as region:
                lo = store.param(name, Kind.LO, region)
                mean = _mean(hi, lo, num_old)
                for row in rows:
                    split_into(mean, hi[row : row + 1], lo[row : row + 1])


def tables(decoder: Decoder) -> list[str]:
    """Return the params that have a row for each token."""
    model = decoder.model
    table = model.get_input_embeddings().weight
    names = [next(name for name, param in model.named_parameters() if param is table)]
    head = decoder.owner(f"{decoder.head_path}.weight")
    bias = f"{decoder.head_path}.bias"
    owned = {param.name for param in decoder.params}
    return list(dict.fromkeys([*names, head, *([bias] if bias in owned else [])]))


def _mean(hi: Tensor, lo: Tensor | None, count: int) -> Tensor:
    """Return the mean of the masters of the first `count` rows, in fp32. (1, ...)"""
    total = torch.zeros((1, *hi.shape[1:]), dtype=torch.float64)
    for start in range(0, count, _ROWS):
        rows = slice(start, min(start + _ROWS, count))
        master = hi[rows].float() if lo is None else join(hi[rows], lo[rows])
        total += master.double().sum(0, keepdim=True)
    return (total / count).float()
