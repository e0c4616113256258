"""Turns of a conversation as a model reads them, and its answer as people do.

Laws (tests/run/evaluation/test_conversation.py)
    1. The text before an answer is that of the model's chat template, with the run's arguments.
    2. A printed answer has no special token, no empty thought and no character that a terminal
       would obey.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from megatrain.data.chat.template import open_text
from megatrain.errors import ConfigError, DataError
from megatrain.text import printable

Turn = dict[str, str]
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>")


def prompt_tokens(
    tokenizer: Any, turns: Sequence[Turn], template_kwargs: Mapping[str, Any]
) -> list[int]:
    """Return the text before an answer, as tokens: without a template the last turn alone.

    Raises DataError if the template refuses the turns.
    """
    if not has_template(tokenizer):
        return open_text(tokenizer, turns[-1]["content"])
    text = prompt_text(tokenizer, turns, template_kwargs)
    return list(tokenizer.encode(text, add_special_tokens=False))


def prompt_text(
    tokenizer: Any, turns: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]
) -> str:
    """Return the text before an answer. Raises DataError if the template refuses the turns."""
    try:
        text = tokenizer.apply_chat_template(
            list(turns), tokenize=False, add_generation_prompt=True, **template_kwargs
        )
    except Exception as error:  # templates raise any exception, on purpose and by mistake
        raise DataError(f"the chat template refuses the turns: {str(error)[:300]}") from error
    return str(text)


def first_turns(tokenizer: Any, system: str | None) -> list[Turn]:
    """Return the turns before the first message. Raises ConfigError without a template for them."""
    if system is None:
        return []
    if not has_template(tokenizer):
        raise ConfigError("--system: the tokenizer has no chat template to hold it")
    return [{"role": "system", "content": system}]


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def printed_answer(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return an answer to print: special tokens end a line, and blank lines around it are gone."""
    text = "\n".join(ordinary_texts(tokenizer, tokens))
    return printable(_EMPTY_THOUGHT.sub("", text, count=1).strip("\n"))


def ordinary_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return the texts between the special tokens of an answer."""
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return [
        str(tokenizer.decode(list(stretch), clean_up_tokenization_spaces=False))
        for is_special, stretch in groupby(tokens, special.__contains__)
        if not is_special
    ]
