"""What the model writes on the way: the same prompts at every evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatrain.pipeline.engine import Engine
from megatrain.sampling import continue_texts
from megatrain.trainer.dataset import end_tokens

SAMPLE_TOKENS = 64


def written_texts(
    engine: Engine, tokenizer: Any, prompts: Sequence[list[int]]
) -> Iterator[dict[str, str]]:
    """Yield each prompt and what the model writes after it, as text."""
    if not prompts:
        return
    made = continue_texts(engine, prompts, SAMPLE_TOKENS, end_tokens(tokenizer))
    for prompt, tokens in zip(prompts, made, strict=True):
        yield {
            "prompt": str(tokenizer.decode(list(prompt))),
            "text": str(tokenizer.decode(list(tokens))),
        }
