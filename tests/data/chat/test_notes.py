"""Notes: what a file holds and the model does not see is counted, and said in a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.data.chat.notes import remarks
from megatrain.data.tokens.prepare import prepare
from megatrain.errors import DataError
from testkit.tokenizers_of_kinds import KINDS, made, tokenizer_of, tokenizer_of_style
from testkit.written import write

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "two"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {}}}


def _card(folder: Path, rows: list[Any], tokenizer: Any, **settings: Any) -> dict[str, Any]:
    path = write(folder / "a.jsonl", rows)
    wanted = {"cache_dir": folder / "cache", "max_length": 512, **settings}
    return prepare(path, tokenizer, **wanted).card


def test_columns_and_keys_that_nobody_reads_are_named(tmp_path: Path) -> None:
    rows = [
        {"messages": [USER, {**ANSWER, "mood": "glad", "thinking": "hm"}], "id": n, "split": None}
        for n in range(3)
    ]
    rows[0]["tools"] = [{"name": "add"}]
    card = _card(tmp_path, rows, tokenizer_of("chatml"), max_lost_thoughts=1.0)
    assert card["unused_columns"] == {"id": 3}
    assert card["passed_through"] == {"mood": 3}
    assert card["unread"] == {"mood": 3, "reasoning_content": 3, "tools": 1}
    said = "\n".join(remarks(card))
    assert "columns that are not used: id (3 rows)" in said
    assert "not read by the chat template, so not trained on: mood (3 rows), reasoning" in said
    assert "3 trained answers have a thought that the chat template leaves out" in said


THOUGHT = {**ANSWER, "content": "<think>hm hm</think>two"}


@pytest.mark.parametrize("train_on", ["assistant", "last", "completion", "all"])
@pytest.mark.parametrize(
    ("style", "answer"), [("deepseek_r1", THOUGHT), ("chatml", {**ANSWER, "thinking": "hm hm"})]
)
def test_answers_whose_thoughts_the_template_removes_are_refused(
    tmp_path: Path, style: str, answer: dict[str, str], train_on: str
) -> None:
    rows = [{"messages": [USER, answer]}] * 4
    with pytest.raises(DataError, match="4 of 4 rows would be trained without their thoughts"):
        _card(tmp_path, rows, tokenizer_of_style(style), train_on=train_on)
    card = _card(
        tmp_path, rows, tokenizer_of_style(style), train_on=train_on, max_lost_thoughts=1.0
    )
    assert card["notes"]["rows_that_lose_thoughts"] == 4
    assert any("4 trained answers have a thought" in line for line in remarks(card))


@pytest.mark.parametrize("train_on", ["assistant", "last", "completion", "all"])
def test_thoughts_of_earlier_turns_may_be_removed(tmp_path: Path, train_on: str) -> None:
    """Qwen3's template does so, and shows each thought where its turn is the last one."""
    tokenizer = tokenizer_of_style("qwen3")
    rows = [{"messages": [USER, THOUGHT, USER, THOUGHT]}] * 2
    card = _card(tmp_path, rows, tokenizer, train_on=train_on)
    assert "rows_that_lose_thoughts" not in card["notes"]


def test_plain_rows_have_nothing_to_be_said_about(tmp_path: Path) -> None:
    assert remarks(_card(tmp_path, [{"messages": [USER, ANSWER]}], tokenizer_of("chatml"))) == []


def test_conversations_that_become_several_documents_are_counted(tmp_path: Path) -> None:
    row = {"messages": [USER, ANSWER] * 5}
    card = _card(tmp_path, [row, row], tokenizer_of("qwen3"))
    assert card["documents"] == 10
    assert card["notes"]["rewritten_rows"] == 2
    factor = card["tokens"] / (card["tokens"] - card["notes"]["repeated_tokens"])
    (said,) = (line for line in remarks(card) if "conversations became" in line)
    assert said.endswith("data.train_on: last trains only the last answer of each")
    assert said.startswith(f"2 conversations became 10 documents and {factor:.1f} times the tokens")
    assert "data.train_on: last" in said
    card = _card(tmp_path, [row, row], tokenizer_of("qwen3"), train_on="last")
    assert card["documents"] == 2
    assert not any("became" in line for line in remarks(card))


def test_turns_without_end_are_said(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    endless = made(template, KINDS["phi"].marks, eos="<|end|>")
    card = _card(tmp_path, [{"messages": [USER, ANSWER]}] * 3, endless)
    assert remarks(card) == [
        "3 trained turns do not end with a control token: the model may not learn to stop; "
        "set data.chat_template to a template that ends turns with one"
    ]


def test_tool_calls_that_the_template_cannot_write_are_bad_rows(tmp_path: Path) -> None:
    rows = [{"messages": [USER, {**ANSWER, "tool_calls": [CALL]}]}]
    with pytest.raises(DataError, match="1 x chat template cannot write tool calls"):
        _card(tmp_path, rows, tokenizer_of("chatml"))


def test_an_argument_that_the_template_does_not_read_is_refused(tmp_path: Path) -> None:
    template = KINDS["chatml"].template + "{% if enable_thinking %}{% endif %}"
    tokenizer = made(template, KINDS["chatml"].marks, eos="<|im_end|>")
    rows = [{"messages": [USER, ANSWER]}]
    _card(tmp_path, rows, tokenizer, template_kwargs={"enable_thinking": False})
    with pytest.raises(DataError, match="the chat template does not read enable_thinkin"):
        _card(tmp_path, rows, tokenizer, template_kwargs={"enable_thinkin": False})
    plain = made(None, KINDS["chatml"].marks, eos="<|im_end|>")
    with pytest.raises(DataError, match="there is no chat template to read it"):
        _card(tmp_path, rows, plain, template_kwargs={"enable_thinking": False})
