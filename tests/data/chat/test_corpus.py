"""Rows of the shapes that real data has, in twelve styles of templates: what is trained, by hand.

corpus/rows.jsonl holds the rows, corpus/expected.toml what each trains, corpus/refused.toml which
are refused and why, testkit/styles the templates. None of them is made by our code.
"""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import testkit
from megatrain.data.chat.masks import Encoder, Tokens
from megatrain.data.chat.render import EMPTY_THOUGHT, LOST_THOUGHT, LOST_WORDS, UNOPENED_THOUGHT
from megatrain.data.rows.formats import format_of
from megatrain.data.rows.rows import canonical
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import DataError
from testkit.tokenizers_of_kinds import tokenizer_of_style

HERE = Path(__file__).parent


def _toml(name: str) -> Any:
    return tomllib.loads((HERE / name).read_text())


LINES = (HERE / "corpus" / "rows.jsonl").read_text().splitlines()
ROWS: dict[str, Any] = {entry["name"]: entry["row"] for entry in map(json.loads, LINES)}
STYLES = tomllib.loads((Path(testkit.__file__).parent / "styles" / "styles.toml").read_text())
EXPECTED = _toml("corpus/expected.toml")
REFUSED = _toml("corpus/refused.toml")
NO_TEMPLATE = "a conversation, but there is no chat template"


@cache
def encoder_of(style: str) -> Encoder:
    return Encoder(tokenizer_of_style(style))


def documents_of(row: Any, style: str) -> list[Tokens]:
    shape = format_of(row)
    assert shape
    return encoder_of(style).encode(canonical(row, shape))


def trained_of(row: Any, style: str) -> list[str]:
    """What is trained, run by run, as text."""
    tokenizer = encoder_of(style).tokenizer
    return [
        tokenizer.decode(document.input_ids[begin:end])
        for document in documents_of(row, style)
        for begin, end in document.runs
    ]


def _written_by_hand() -> list[tuple[str, str]]:
    return [(style, name) for style, rows in EXPECTED.items() for name in rows]


@pytest.mark.parametrize(("style", "name"), _written_by_hand())
def test_what_is_trained_is_what_was_written_by_hand(style: str, name: str) -> None:
    assert trained_of(ROWS[name], style) == EXPECTED[style][name]


def _refused(style: str) -> dict[str, str]:
    """Why each row is refused in a style, for those that are."""
    table = {**REFUSED.get(style, {})}
    found = {} if style == "every_style" else _refused("every_style")
    if like := table.pop("like", None):
        found |= _refused(like)
    if trained := table.pop("only_trained", None):
        found |= {name: NO_TEMPLATE for name in ROWS if name not in (*found, *trained)}
    return found | {name: reason for reason, names in table.items() for name in names}


@pytest.mark.parametrize("style", STYLES)
def test_every_row_is_trained_or_refused_for_its_reason(style: str) -> None:
    found = {}
    for name, row in ROWS.items():
        try:
            documents_of(row, style)
        except BadRow as bad:
            found[name] = bad.reason
        except DataError as error:
            found[name] = NO_TEMPLATE if NO_TEMPLATE in str(error) else str(error)
    assert found == _refused(style)


@pytest.mark.merge
def test_a_row_of_ten_megabytes() -> None:
    answer = "hello world " * 850_000
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": answer}]
    assert trained_of({"messages": turns}, "chatml") == [answer + "<|im_end|>"]


@pytest.mark.parametrize(
    ("style", "name", "count"),
    [
        ("chatml", "two turns", 1),
        ("phi", "two turns", 1),
        ("qwen3", "two turns", 2),
        ("harmony", "two turns", 2),
        ("qwen3", "a thought before a call", 1),
        ("qwen3", "two answers in a row", 2),
        ("harmony", "a thought before a call", 2),
        ("mistral", "calls over two questions", 2),
    ],
)
def test_a_row_becomes_as_few_documents_as_its_template_allows(
    style: str, name: str, count: int
) -> None:
    assert len(documents_of(ROWS[name], style)) == count


@pytest.mark.parametrize(
    ("style", "name", "notes"),
    [
        ("chatml", "one turn", ()),
        ("qwen3", "one turn", (EMPTY_THOUGHT,)),
        ("qwen3", "reasoning_content", ()),
        ("qwen3", "thinking switched off", ()),
        ("chatml", "reasoning_content", (LOST_THOUGHT,)),
        ("deepseek_r1", "one turn", (UNOPENED_THOUGHT,)),
        ("deepseek_r1", "a thought in the content", (UNOPENED_THOUGHT, LOST_THOUGHT)),
        ("llama31", "words before a call", (LOST_WORDS,)),
    ],
)
def test_what_a_template_leaves_out_is_noted(style: str, name: str, notes: tuple[str, ...]) -> None:
    (document,) = documents_of(ROWS[name], style)
    assert document.notes == notes
