"""Documents and their rows: what belongs together stays together, and nothing leaks."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.tokens.documents import (
    Documents,
    JoinedDocuments,
    Subset,
    documents_of,
    hold_out,
    num_rows,
)
from megatrain.data.tokens.prepare import prepare
from megatrain.data.tokens.prepared import PreparedData
from megatrain.errors import DataError
from testkit.made_documents import SPAN, MadeDocuments
from testkit.tokenizers_of_kinds import tokenizer_of
from testkit.written import write

MADE = MadeDocuments([4, 5, 6, 7, 8, 9, 10], counts=[1, 3, 1, 2])


def _all(documents: Documents) -> list[list[int]]:
    """Which made documents each row has, by its tokens."""
    starts = documents.row_starts.tolist()
    return [
        [int(documents.tokens(number)[0][0]) // SPAN for number in range(first, last)]
        for first, last in pairwise(starts)
    ]


def test_the_documents_of_a_row_are_found() -> None:
    rows = np.array([3, 0, 1])
    assert documents_of(rows, MADE.row_starts).tolist() == [5, 6, 0, 1, 2, 3]


def test_a_subset_keeps_whole_rows() -> None:
    some = Subset(MADE, np.array([1, 3]))
    assert _all(some) == [[1, 2, 3], [5, 6]]
    assert some.lengths.tolist() == [5, 6, 7, 9, 10]


def test_joined_rows_are_numbered_through() -> None:
    joined = JoinedDocuments([Subset(MADE, np.array([1])), MADE])
    assert _all(joined) == [[1, 2, 3], [0], [1, 2, 3], [4], [5, 6]]
    assert num_rows(joined) == 5


def test_too_few_rows_to_hold_out_are_refused() -> None:
    with pytest.raises(DataError, match=r"a\.jsonl: 1 rows are too few to hold out 1 of them"):
        hold_out(MadeDocuments([3, 4], counts=[2]), 0.5, 0, "a.jsonl")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    """1,000 conversations of 1 to 12 turns, each with a first question of its own."""
    draw = random.Random(0)
    rows = []
    for number in range(1000):
        turns: list[dict[str, Any]] = []
        for turn in range(draw.randint(1, 12)):
            asked = f"talk {number} turn {turn}"
            turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": "two"}]
        rows.append({"messages": turns})
    return _prepared(tmp_path_factory.mktemp("chats") / "a.jsonl", rows)


def _prepared(path: Path, rows: list[dict[str, Any]], **changes: Any) -> PreparedData:
    settings: dict[str, Any] = {"max_length": 1024, **changes}
    return prepare(
        write(path, rows), tokenizer_of("qwen3"), cache_dir=path.parent / "cache", **settings
    )


def _prefixes(documents: Documents) -> set[tuple[int, ...]]:
    """The first question of each document, with its marks."""
    end = tokenizer_of("qwen3").convert_tokens_to_ids("<|im_end|>")
    found = set()
    for number in range(len(documents.lengths)):
        ids = documents.tokens(number)[0]
        found.add(tuple(ids[: int(np.argmax(ids == end))].tolist()))
    return found


@pytest.mark.merge
def test_documents_know_their_rows(chats: PreparedData) -> None:
    assert chats.card["rows"] == chats.card["kept"] == num_rows(chats) == 1000
    assert chats.card["documents"] > 3000
    assert sorted(set(chats.rows.tolist())) == list(range(1000))
    assert len(_prefixes(chats)) == 1000


@pytest.mark.few(3)
@pytest.mark.parametrize("fraction", [0.001, 0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 42])
def test_no_conversation_is_on_both_sides(chats: PreparedData, fraction: float, seed: int) -> None:
    train, held = hold_out(chats, fraction, seed)
    assert num_rows(held) == math.ceil(fraction * 1000)
    assert num_rows(train) + num_rows(held) == 1000
    assert len(train.lengths) + len(held.lengths) == len(chats.lengths)
    assert _prefixes(train) & _prefixes(held) == set()
    assert len(_prefixes(held)) == num_rows(held)


def test_pieces_of_a_split_text_stay_together(tmp_path: Path) -> None:
    rows = [{"text": f"text {number} " * 40} for number in range(50)]
    pieces = _prepared(tmp_path / "a.txt", rows, max_length=64, overlong="split")
    assert len(pieces.lengths) > 100
    train, held = hold_out(pieces, 0.2, 0)
    sides = [sum(map(len, _all_tokens(side))) for side in (train, held)]
    assert num_rows(held) == 10
    assert sum(sides) == pieces.card["tokens"]
    # Every piece of the held-out texts is there: they end with the end-of-text token.
    end = tokenizer_of("qwen3").eos_token_id
    ends = [row[-1] for row in _all_tokens(held)]
    assert ends == [end] * 10


def _all_tokens(documents: Documents) -> list[list[int]]:
    """The tokens of each row, its documents put together again."""
    starts = documents.row_starts.tolist()
    return [
        [token for number in range(a, b) for token in documents.tokens(number)[0].tolist()]
        for a, b in pairwise(starts)
    ]
