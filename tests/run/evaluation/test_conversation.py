"""Laws of conversation.py."""

from __future__ import annotations

import copy

import pytest
from tokenizers.processors import TemplateProcessing

from megatrain.cli.demo import byte_tokenizer
from megatrain.errors import ConfigError, DataError
from megatrain.run.evaluation.conversation import (
    first_turns,
    ordinary_texts,
    printed_answer,
    prompt_tokens,
)
from megatrain.text import printable
from testkit.tokenizers_of_kinds import made, tokenizer_of

BYTES = byte_tokenizer()
HELLO = [{"role": "user", "content": "hello"}]


def test_turns_that_the_template_refuses_are_an_error() -> None:
    with pytest.raises(DataError, match="refuses the turns: no system role"):
        prompt_tokens(
            tokenizer_of("gemma"), [{"role": "system", "content": "be brief"}, *HELLO], {}
        )


def test_the_template_gets_the_arguments_of_the_run() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = "{{ messages[-1].content }}{% if brief %} brief{% endif %}"
    found = [prompt_tokens(tokenizer, HELLO, kwargs) for kwargs in ({"brief": True}, {})]
    assert [tokenizer.decode(tokens) for tokens in found] == ["hello brief", "hello"]


def test_without_a_template_the_last_message_alone_is_continued() -> None:
    plain = copy.deepcopy(tokenizer_of("chatml"))
    plain.chat_template = None
    assert prompt_tokens(plain, [*HELLO, *HELLO], {}) == prompt_tokens(plain, HELLO, {})
    with pytest.raises(ConfigError, match="no chat template to hold it"):
        first_turns(plain, "be brief")


def test_a_text_that_is_to_be_continued_does_not_end() -> None:
    """Some tokenizers put an end after every text."""
    closing = made(None, ("<s>", "</s>"), eos="</s>")
    closing.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(m, closing.vocab[m]) for m in ("<s>", "</s>")]
    )
    found = prompt_tokens(closing, HELLO, {})
    assert closing.decode(found) == "<s>hello"
    assert closing.decode(closing("hello")["input_ids"]) == "<s>hello</s>"


def test_what_a_terminal_would_obey_is_shown() -> None:
    text = "red \x1b[31m \x1b]0;title\x07 \u202e end"
    assert printed_answer(BYTES, BYTES.encode(text)) == printable(text) != text


def test_special_tokens_are_left_out_and_end_a_line() -> None:
    tokenizer = tokenizer_of("qwen3")
    empty = tokenizer.encode("<think>\n\n</think>\n\nhello<|im_end|>")
    assert printed_answer(tokenizer, empty) == "hello"
    thought = tokenizer.encode("<think>two</think>hello")
    assert printed_answer(tokenizer, thought) == "two\nhello"
    assert ordinary_texts(tokenizer, thought)[-1] == "hello"
