"""Laws of prompts.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli.demo import byte_tokenizer
from megatrain.cli.verbs import look_at_config
from megatrain.config import Config
from megatrain.data.chat.template import FORMATTED
from megatrain.data.prompts import Prompts, gather_prompts
from megatrain.data.rows.cells import MEDIA
from megatrain.errors import DataError

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
ROW: dict[str, Any] = {"prompt": "hi", "answer": "42"}


def gathered(path: Path, *rows: Mapping[str, Any], tokenizer: Any = None, **data: Any) -> Prompts:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns, most = data.pop("columns", {}), data.pop("most", None)
    config = Config(
        model="m",
        data={"train": {"path": str(path), "columns": columns}, "max_length": 64, **data},
        loss="grpo",
        rollouts={"max_new_tokens": 40},
        train={"batch_rows": 2},
        eval={"max_rows": most},
    )
    return gather_prompts(config, tokenizer or byte_tokenizer(), {})


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {"prompt": TURNS[:1]},
        {"messages": TURNS},
        {"question": "hi", "answer": "42"},
        {"instruction": "hi", "output": "42"},
    ],
)
def test_tokens_are_those_of_the_template_and_the_row_is_whole(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    tokenizer = byte_tokenizer()
    expected = tokenizer.apply_chat_template(TURNS[:1], add_generation_prompt=True)
    (prompt,) = gathered(tmp_path / "rows.jsonl", row).train
    assert list(prompt.tokens) == list(expected["input_ids"])
    assert prompt.row == row


def test_without_a_template_the_text_is_the_prompt(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    found = gathered(tmp_path / "rows.jsonl", ROW, tokenizer=tokenizer, chat_template="none")
    assert tokenizer.decode(list(found.train[0].tokens)) == "hi"
    with pytest.raises(DataError, match="a row has 3 turns, but there is no chat template"):
        gathered(
            tmp_path / "rows.jsonl",
            {"prompt": [*TURNS, TURNS[0]]},
            tokenizer=tokenizer,
            chat_template="none",
        )


def test_a_prompt_in_the_form_of_the_template_is_refused(tmp_path: Path) -> None:
    prompt = byte_tokenizer().apply_chat_template(
        TURNS[:1], add_generation_prompt=True, tokenize=False
    )
    with pytest.raises(DataError, match=FORMATTED):
        gathered(tmp_path / "rows.jsonl", {"prompt": prompt})
    (kept,) = gathered(tmp_path / "rows.jsonl", {"prompt": prompt}, chat_template="none").train
    expected = gathered(tmp_path / "rows.jsonl", ROW).train[0]
    assert kept.tokens == expected.tokens


def test_turns_may_be_text(tmp_path: Path) -> None:
    turns = gathered(tmp_path / "rows.jsonl", {"prompt": TURNS[:1]}).train[0]
    text = gathered(tmp_path / "rows.jsonl", {"prompt": json.dumps(TURNS[:1])}).train[0]
    assert text.tokens == turns.tokens


def test_a_column_of_another_name_is_named(tmp_path: Path) -> None:
    row = {"ask": {"text": "hi"}, "answer": "42"}
    found = gathered(tmp_path / "rows.jsonl", row, columns={"prompt": "ask.text"})
    assert found.train[0].tokens == gathered(tmp_path / "rows.jsonl", ROW).train[0].tokens
    assert found.train[0].row == row


def test_rows_without_a_prompt_or_room_for_an_answer_are_counted(tmp_path: Path) -> None:
    rows = [ROW] * 8 + [
        {"answer": "42"},
        {"prompt": "x" * 30},
        {**ROW, "images": ["a.png"]},
    ]
    found = gathered(tmp_path / "rows.jsonl", *rows, max_bad=0.5, max_dropped=0.5)
    card = found.sources[0].card
    assert len(found.train) == card["kept"] == 8
    assert card["bad_places"]["no prompt"][0].startswith("rows.jsonl:9 (columns answer")
    assert card["bad_places"][MEDIA] == ["rows.jsonl:11 (answers are drawn from text alone)"]
    assert card["dropped_places"]["longer than max_length"][0].startswith("rows.jsonl:10 (")
    with pytest.raises(DataError, match="rows cannot be used"):
        gathered(tmp_path / "rows.jsonl", *rows)


def test_prompts_are_held_out_and_known_by_their_digest(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}"} for n in range(10)]
    found = gathered(tmp_path / "rows.jsonl", *rows, eval=0.2)
    assert (len(found.train), len(found.held)) == (8, 2)
    assert {one.row["prompt"] for one in (*found.train, *found.held)} == set("0123456789")
    again = gathered(tmp_path / "rows.jsonl", *rows, eval=0.2)
    assert (again.digest, again.held_digest) == (found.digest, found.held_digest)
    rows[3] = {**rows[3], "answer": "other"}  # a function would reward it in another way
    assert gathered(tmp_path / "rows.jsonl", *rows, eval=0.2).digest != found.digest


@pytest.mark.parametrize("most", [None, 6, 2])
def test_an_evaluation_takes_a_part_of_each_source(tmp_path: Path, most: int | None) -> None:
    sources = []
    for name, count in (("a", 20), ("b", 2), ("c", 2)):
        sources.append(str(tmp_path / f"{name}.jsonl"))
        lines = [json.dumps({"prompt": f"{name}{n}"}) + "\n" for n in range(count)]
        Path(sources[-1]).write_text("".join(lines))
    found = gathered(tmp_path / "rows.jsonl", ROW, eval=sources, most=most)
    held = [str(one.row["prompt"]) for one in found.held]
    counts = {None: (20, 2, 2), 6: (4, 1, 1), 2: (1, 1, 1)}[most]
    named = zip("abc", counts, strict=True)
    assert held == [f"{name}{n}" for name, count in named for n in range(count)]


def test_the_prompts_of_a_config_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    config = Config(
        model=str(tmp_path / "model"),
        data=str(tmp_path / "rows.jsonl"),
        loss="grpo",
        train={"batch_rows": 2},
    )
    look_at_config(config, 1)
    printed = capsys.readouterr().out
    assert "1 row read, 1 kept" in printed
    assert "hi" in printed
