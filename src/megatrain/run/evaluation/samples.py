"""What the model writes on the way: the same prompts at every evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatrain.config import Config
from megatrain.disk.hf.model import HostModel
from megatrain.engine.engine import Engine
from megatrain.errors import ModelFolderError
from megatrain.planning.plan import Plan
from megatrain.run.evaluation.answers import Question
from megatrain.run.evaluation.sampling import continue_texts
from megatrain.text import duration

SAMPLE_TOKENS = 64
"""Of each text: as often all weights cross the link, once for all texts together."""
GENERATION_NAME = "generation_config.json"


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
    engine: Engine, home: HostModel, tokenizer: Any, asked: Sequence[Question]
) -> Iterator[dict[str, str]]:
    """Yield each prompt, the generated text, and the expected text of the row."""
    if not asked:
        return
    prompts = [list(question.prompt) for question in asked]
    made = continue_texts(engine, prompts, SAMPLE_TOKENS, end_tokens(tokenizer, home))
    for question, tokens in zip(asked, made, strict=True):
        yield {
            "prompt": str(tokenizer.decode(list(question.prompt))),
            "text": str(tokenizer.decode(list(tokens))),
            "expected": str(tokenizer.decode(list(question.answer))),
        }


def end_tokens(tokenizer: Any, home: HostModel) -> frozenset[int]:
    """Return every token that ends a text, as transformers' `generate` knows them.

    They are those of generation_config.json, or of config.json if it names none, and the
    tokenizer's own. Raises ModelFolderError.
    """
    named = _generation_config(home.carried).get("eos_token_id")
    if named is None:
        parts = (home.decoder.config, home.decoder.text_config)
        ends_of = (getattr(part, "eos_token_id", None) for part in parts)
        named = next((end for end in ends_of if end is not None), None)
    ends = [*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id]
    return frozenset(end for end in ends if type(end) is int)


def _generation_config(carried: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        fields = json.loads(carried.get(GENERATION_NAME, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{GENERATION_NAME} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(fields, dict):
        raise ModelFolderError(f"{GENERATION_NAME} is a {type(fields).__name__}, not an object")
    return fields
