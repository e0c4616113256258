"""Texts of the model during training: the same prompts at every evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.data.preview import shown_text
from megatrain.data.steps.micro_batches import ReadItem
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.planning.plan import Plan
from megatrain.run import optional
from megatrain.text import duration

if TYPE_CHECKING:
    from megatrain.run.evaluation.answers import Question

SAMPLE_TOKENS = 64
"""Tokens of each text. For each, all weights cross the link once, for all texts together."""


def writes_after(step: int, num_steps: int, config: Config) -> bool:
    """Return whether the model writes after an evaluation.

    Without rows to evaluate on it writes before the first step and after the last one only.
    """
    return step in (0, num_steps) or config.data.eval is not None


def samples_in_words(config: Config, plan: Plan, num_steps: int, weight_bytes: int) -> str:
    """Return how often the model writes and what that costs, as far as the plan knows it."""
    every, count = config.eval.every, config.eval.samples
    steps = {0, num_steps, *range(0, num_steps, every or num_steps)}
    times = sum(writes_after(step, num_steps, config) for step in steps)
    if count == 0:
        return "samples   none: eval.samples is 0"
    text = f"samples   {count} of up to {SAMPLE_TOKENS} tokens, {times} times"
    if config.data.eval is None:
        text += " (before and after: data.eval is null)"
    if not plan.knows_time:
        return text
    machine = plan.profile
    rate = machine.dram_bytes_per_s if machine.unified else machine.copy_in_bytes_per_s
    seconds = SAMPLE_TOKENS * weight_bytes / rate
    share = times * seconds / (times * seconds + num_steps * plan.step_s)
    return f"{text}: about {duration(seconds)} each, {share:.1%} of the run"


def written_texts(
    engine: Engine,
    home: HostModel,
    tokenizer: Any,
    asked: Sequence[Question],
    read: ReadItem | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield each prompt, the generated text, and the expected text of the row.

    `read` returns media of prompts by their digests.
    """
    if not asked:
        return
    prompts = [list(question.prompt) for question in asked]
    media = [question.read_media(read) for question in asked]
    ends = end_tokens(tokenizer, home)
    made = optional.sampling.continue_texts(engine, prompts, SAMPLE_TOKENS, ends, media=media)
    for question, tokens in zip(asked, made, strict=True):
        yield {
            "prompt": shown_text(question.prompt, question.media, tokenizer),
            "text": str(tokenizer.decode(list(tokens))),
            "expected": str(tokenizer.decode(list(question.answer))),
        }


def end_tokens(tokenizer: Any, home: HostModel) -> frozenset[int]:
    """Return every token that ends a text: those of the model's files, and the tokenizer's own."""
    own = tokenizer.eos_token_id
    return home.decoder.end_tokens | ({own} if type(own) is int else set())
