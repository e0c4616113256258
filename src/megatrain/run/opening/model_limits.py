"""Rows compared with the model's limits: its vocabulary and its positions.

Both are known before the weights are read. A token id beyond the embedding and a position beyond a
table of positions would end a run at the first batch that has one, maybe hours in; on a GPU with an
assertion of the device. Rotary positions have no such end: the model only was never trained there,
which days of training would show too late. A run does not begin so unless model.rope says it.

Laws (tests/run/opening/test_model_limits.py)
    1. Accepted rows can be trained; rows that would fail in the model are refused with their place.
    2. No run begins with rows beyond rotary positions that model.rope could declare.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from megatrain.data.tokens.prepared import PreparedData
from megatrain.errors import DataError
from megatrain.models.decoder import Decoder
from megatrain.models.rope import line_for, num_positions

_TABLE = re.compile(r"(wpe|pos\w*)$", re.IGNORECASE)


def check_rows(
    sources: Iterable[PreparedData], decoder: Decoder, *, begins: bool = False
) -> list[str]:
    """Return the remarks about the rows and the model; a run `begins` with them, or only reads.

    Raises DataError if the model has no embedding for a token, or no place for a position.
    """
    notes = []
    for source in sources:
        check_vocabulary(source, decoder.text_config.vocab_size)
        notes += check_positions(source, decoder, begins=begins)
    return notes


def check_vocabulary(source: PreparedData, vocab_size: int) -> None:
    """Raise DataError if a token id is beyond the model's embedding."""
    card = source.card
    if card["largest_id"] >= vocab_size:
        raise DataError(
            f"{card['source']}: {card['largest_id_place']} has token id {card['largest_id']:,}, "
            f"but the model's embedding has {vocab_size:,} rows (vocab_size of config.json). The "
            "tokenizer has tokens that the model does not know: use the tokenizer of this model."
        )


def check_positions(source: PreparedData, decoder: Decoder, *, begins: bool) -> list[str]:
    """Return a warning if rows are longer than what the model was made for.

    Raises DataError if the model has a table of positions, which they exceed, and for a run that
    `begins` if model.rope can make the model reach them.
    """
    most, card = num_positions(decoder.text_config), source.card
    if most is None or card["longest"] <= most:
        return []
    count = int((source.lengths > most).sum())
    text = (
        f"{card['source']}: {count:,} of {len(source.lengths):,} documents are longer than the "
        f"{most:,} positions of the model (max_position_embeddings); the longest has "
        f"{card['longest']:,} tokens ({card['longest_place']})"
    )
    if has_position_table(decoder.model):
        raise DataError(f"{text}. It has no embedding beyond them: set data.max_length to {most}.")
    line = line_for(decoder.config, card["longest"])
    if begins and line is not None:
        raise DataError(
            f"{text}. The model was not trained there. Give `{line}` to scale its positions (with "
            f"type default they stay as they are), or data.max_length: {most}."
        )
    return [f"{text}. The model was not trained there; data.max_length: {most} leaves them out"]


def has_position_table(model: nn.Module) -> bool:
    """Return whether positions are looked up in a table, which has an end."""
    tables = (name for name, part in model.named_modules() if isinstance(part, nn.Embedding))
    # Sines that GPT-J and its kin compute once and then look up.
    sines = (name for name, _ in model.named_buffers() if name.endswith("embed_positions"))
    return any(_TABLE.search(name) for name in (*tables, *sines))
