"""Texts of the model during training: the same prompts at every evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatrain.data.chat.masks import answer_ends
from megatrain.data.preview import shown_text
from megatrain.data.steps.micro_batches import ReadItem
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.engine.sampling import continue_texts
from megatrain.run.evaluation.answers import Question


def written_texts(
    engine: Engine,
    home: HostModel,
    tokenizer: Any,
    asked: Sequence[Question],
    num_tokens: int,
    read: ReadItem | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield each prompt, the generated text, and the expected text of the row.

    `num_tokens`: the length of a text, at most. `read` returns media of prompts by their digests.
    """
    if not asked:
        return
    prompts = [list(question.prompt) for question in asked]
    media = [question.read_media(read) for question in asked]
    made = continue_texts(engine, prompts, num_tokens, eos_token_ids(tokenizer, home), media=media)
    for question, tokens in zip(asked, made, strict=True):
        yield {
            "prompt": shown_text(question.prompt, question.media, tokenizer),
            "text": str(tokenizer.decode(list(tokens))),
            "expected": str(tokenizer.decode(list(question.answer))),
        }


def eos_token_ids(tokenizer: Any, home: HostModel) -> frozenset[int]:
    """Return every token that ends a text.

    They are those of the model's files, the tokenizer's own, and that of its chat template.
    """
    own = (tokenizer.eos_token_id, *answer_ends(tokenizer))
    return home.decoder.eos_token_ids | {token for token in own if type(token) is int}
