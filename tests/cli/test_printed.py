"""Laws of printed.py."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megatrain.cli.demo import byte_tokenizer
from megatrain.cli.printed import PrintedAnswer, printed_answer
from megatrain.text import printable
from testkit.tokenizers_of_kinds import tokenizer_of

BYTES = byte_tokenizer()
TEXTS = [
    "two\n\nthree\tfour",
    "\u00e9\u4e2d\U0001f600 and \u4e2d",  # characters of two, three and four tokens
    "red \x1b[31m \x1b]0;title\x07 \u202e end",
    "<think>\nfour\n</think>\n\nsix",
    "a < b",
]


def pieces(tokenizer: Any, tokens: list[int]) -> list[str]:
    answer = PrintedAnswer(tokenizer)
    return [*map(answer.add, tokens), answer.end()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_printable_text(text: str) -> None:
    found = pieces(BYTES, BYTES.encode(text))
    assert "".join(found) == printable(text)
    assert not any("\ufffd" in piece or printable(piece) != piece for piece in found)
    assert len([piece for piece in found if piece]) > 1


def test_a_character_that_is_printed_in_parts_would_be_noticed() -> None:
    tokens = BYTES.encode("\u4e2d")
    assert "\ufffd" in BYTES.decode(tokens[:2])
    assert pieces(BYTES, tokens) == ["", "", "\u4e2d", ""]


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("<think>\n\n</think>\n\nsix\n\n", "six"),
        ("\n\n<think></think>six", "six"),
        ("\n\n\nsix\n\n\nfour\n\n", "six\n\n\nfour"),
        ("<think>\n\n", "<think>"),
        ("<thin", "<thin"),
        ("", ""),
    ],
)
def test_an_empty_thought_and_blank_lines_around_an_answer_are_not_printed(
    text: str, printed: str
) -> None:
    assert printed_answer(BYTES, BYTES.encode(text)) == printed


def test_special_tokens_are_left_out_and_end_a_line() -> None:
    tokenizer = tokenizer_of("qwen3")
    empty = tokenizer.encode("<think>\n\n</think>\n\nhello<|im_end|>")
    assert printed_answer(tokenizer, empty) == "hello"
    assert tokenizer.decode(empty, skip_special_tokens=True).startswith("\n\n\n\n")
    thought = tokenizer.encode("<think>two</think>hello")
    assert printed_answer(tokenizer, thought) == "two\nhello"


def test_bytes_beside_words_become_characters() -> None:
    """Such tokenizers decode a run of bytes as a whole: one stray byte, and all are unknown."""
    words = {"<unk>": 0, "hello": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    backend = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokens = [1, *(2 + byte for byte in "\u4e2d\u00e9".encode())]
    assert pieces(tokenizer, tokens) == ["hello", "", "", "\u4e2d", "", "\u00e9", ""]
    assert tokenizer.decode(tokens[:-1]) == "hello" + 4 * "\ufffd"
    assert pieces(tokenizer, tokens[:-1])[-1] == "\ufffd"
