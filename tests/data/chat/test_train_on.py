"""Which turns of a row are trained: by data.train_on, by the row's own marks, by its prompt."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken

from megatrain.data.chat.masks import Encoder, answer_ends
from megatrain.data.chat.render import REWRITTEN
from megatrain.data.chat.template import FORMATTED
from megatrain.data.rows.formats import format_of
from megatrain.data.rows.rows import Row, canonical
from megatrain.data.rows.skipped import BadRow
from testkit.tokenizers_of_kinds import KINDS, made, tokenizer_of
from tests.data.chat.test_render import OPEN_MARKS, OPEN_TURNS, trained_text

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "b"},
    {"role": "tool", "content": "found"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "three"},
]
ENDED = ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]
TOOL = "b<|im_end|>\n<|im_start|>tool\nfound<|im_end|>\n<|im_start|>assistant\nc<|im_end|>"
EMPTY = "<think>\n\n</think>\n\n"


def _row(value: dict[str, Any]) -> Row:
    shape = format_of(value)
    assert shape
    return canonical(value, shape)


def _trained(value: dict[str, Any], train_on: Any, kind: str = "chatml") -> list[str]:
    return trained_text(kind, Encoder(tokenizer_of(kind), train_on).encode(_row(value)))


@pytest.mark.parametrize(
    ("train_on", "trained"), [("assistant", ENDED), ("last", ENDED[2:]), ("completion", [TOOL])]
)
def test_the_turns_that_are_trained(train_on: str, trained: list[str]) -> None:
    assert _trained({"messages": TALK}, train_on) == trained


def test_a_line_break_after_the_end_is_not_trained_where_it_is_a_token() -> None:
    """Gemma's tokenizers have one for each run of line breaks."""
    tokenizer = made(KINDS["gemma"].template, KINDS["gemma"].marks, eos="<eos>")
    tokenizer.add_tokens([AddedToken("\n", special=False, normalized=False)])
    talk = _row({"messages": TALK[:4]})
    (document,) = Encoder(tokenizer).encode(talk)
    trained = [i for i, t in zip(document.input_ids, document.trained, strict=True) if t]
    assert tokenizer.decode(trained) == "a</turn>b</turn>"


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_an_answer_is_the_last_token_that_is_trained(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    assert tokenizer.convert_ids_to_tokens(answer_ends(tokenizer)) == [KINDS[kind].end]


def test_words_are_no_end_of_an_answer() -> None:
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    for given in (template, "{{ raise_exception('no') }}", None):
        assert answer_ends(made(given, ("<s>", "</s>"), eos="</s>")) == []


def test_answers_and_calls_that_nothing_closes_end_with_what_opens_the_next_turn() -> None:
    tokenizer = made(OPEN_TURNS, OPEN_MARKS, eos="<|endoftext|>")
    ends = tokenizer.convert_ids_to_tokens(answer_ends(tokenizer))
    assert ends == ["<|user|>", "<|observation|>"]


def test_last_is_one_document_of_a_thinking_model() -> None:
    encoder = Encoder(tokenizer_of("qwen3"), "last")
    documents = encoder.encode(_row({"messages": TALK[:4]}))
    assert trained_text("qwen3", documents) == [f"{EMPTY}b<|im_end|>"]
    assert len(documents) == 1


@pytest.mark.parametrize("kind", ["chatml", "qwen3", "zephyr"])
@pytest.mark.parametrize("train_on", ["assistant", "last", "completion"])
def test_answers_in_a_prompt_are_not_trained(train_on: str, kind: str) -> None:
    value = {"prompt": TALK[:3], "completion": TALK[3:4]}
    assert _trained(value, train_on, kind) == [f"{KINDS[kind].before}b{KINDS[kind].end}"]


def test_a_conversation_that_ends_with_a_question_has_a_completion() -> None:
    assert _trained({"messages": TALK[:3]}, "completion") == ENDED[:1]


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
@pytest.mark.parametrize("kind", ["chatml", "qwen3", "zephyr"])
@pytest.mark.parametrize("answer", [1, 3])
def test_a_turn_that_the_row_leaves_out_is_not_trained(
    answer: int, kind: str, mark: dict[str, Any]
) -> None:
    talk = [{**turn, **mark} if n == answer else turn for n, turn in enumerate(TALK[:4])]
    other = TALK[4 - answer]["content"]
    expected = [f"{KINDS[kind].before}{other}{KINDS[kind].end}"]
    assert _trained({"messages": talk}, "assistant", kind) == expected


def test_a_turn_left_out_is_not_trained_where_all_else_is() -> None:
    talk = [{**turn, "weight": 0} if n == 1 else turn for n, turn in enumerate(TALK[:4])]
    (before, after) = _trained({"messages": talk}, "all")
    assert before == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert after.startswith("<|im_start|>user\ntwo")
    with pytest.raises(BadRow, match=REWRITTEN):
        _trained({"messages": talk}, "all", "qwen3")


def test_a_row_whose_turns_are_all_left_out_trains_nothing() -> None:
    talk = [{**turn, "weight": 0} for turn in TALK]
    for train_on in ("assistant", "last", "completion"):
        assert _trained({"messages": talk}, train_on) == []


# --- prompt and completion as plain text ---------------------------------------------------------

PLAIN = made(None, ("<s>", "</s>"), eos="</s>")


@pytest.mark.parametrize("completion", ["two", "two</s>"])
@pytest.mark.parametrize("train_on", ["assistant", "last", "completion", "all"])
def test_an_end_that_is_there_is_not_written_twice(train_on: Any, completion: str) -> None:
    row = _row({"prompt": "hello", "completion": completion})
    (document,) = Encoder(PLAIN, train_on).encode(row)
    assert PLAIN.decode(document.input_ids) == "hellotwo</s>"
    trained = [i for i, t in zip(document.input_ids, document.trained, strict=True) if t]
    assert PLAIN.decode(trained) == ("hellotwo</s>" if train_on == "all" else "two</s>")
    assert document.num_open == 0


def test_a_first_token_that_is_there_is_not_written_twice() -> None:
    encoder = Encoder(PLAIN)
    encoder._before = [PLAIN.bos_token_id]
    for prompt in ("hello", "<s>hello"):
        (document,) = encoder.encode(_row({"prompt": prompt, "completion": "two"}))
        assert PLAIN.decode(document.input_ids) == "<s>hellotwo</s>"


def test_a_prompt_in_the_form_of_the_template_is_refused() -> None:
    value = {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "completion": "a"}
    with pytest.raises(BadRow, match=FORMATTED) as refused:
        _trained(value, "assistant")
    assert "data.chat_template: none" in refused.value.detail
    assert _trained({**value, "prompt": "hi"}, "assistant") == ENDED[:1]


# --- arguments of the template -------------------------------------------------------------------

_SAYS = "{% if style %}{{ '<' + style + '>' }}{% endif %}"
STYLED = made(_SAYS + KINDS["chatml"].template, KINDS["chatml"].marks, eos="<|im_end|>")


@pytest.mark.parametrize(
    ("given", "of_row", "said"),
    [({}, {}, ""), ({"style": "x"}, {}, "<x>"), ({}, {"style": "y"}, "<y>"),
     ({"style": "x"}, {"style": "y"}, "<y>"), ({"style": "x"}, '{"style": "y"}', "<y>")],
)  # fmt: skip
def test_a_rows_own_arguments_come_first(given: Any, of_row: Any, said: str) -> None:
    row = _row({"messages": TALK[:2], "chat_template_kwargs": of_row})
    (document,) = Encoder(STYLED, "assistant", given).encode(row)
    assert STYLED.decode(document.input_ids).startswith(f"{said}<|im_start|>user")


@pytest.mark.parametrize("name", ["messages", "tokenize", "chat_template", "tools"])
def test_no_row_takes_the_place_of_what_the_template_is_given(name: str) -> None:
    with pytest.raises(BadRow, match="wrong type"):
        _row({"messages": TALK[:2], "chat_template_kwargs": {name: True}})
