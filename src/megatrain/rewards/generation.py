"""Answers from the model that is trained, drawn between its steps, with keys and values kept.

As many layers as fit stay on the device meanwhile; the others cross the link once per token, for
all answers that have room for keys and values: see engine/sampling.py. For long answers of
models that do not fit the device take a server: completions.py.

Laws (tests/rewards/test_generation.py)
    1. Greedy answers are those of transformers' `generate`.
    2. The same seed gives the same answers; each sample of a prompt is drawn by itself.
    3. Log-probabilities are those of `Engine.logprobs` at the same temperature.
    4. Without layers that stay, all weights are moved once per token of the longest answer, if all
       have room; with all of them, once (tests/engine/test_staying.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatrain.engine.compute.drawing import SamplingParams
from megatrain.engine.engine import Engine
from megatrain.engine.sampling import continuations
from megatrain.errors import BatchError, ConfigError
from megatrain.rewards.rollouts import Rollout


def generate(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_samples: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_token_ids: Collection[int] | None = None,
) -> list[Rollout]:
    """Return `num_samples` answers to each prompt, those of one prompt in a row.

    Prompts are tokens. `temperature` 0 takes the likeliest token each time. An answer ends with
    one of `eos_token_ids`; None takes those of the model's generation_config.json, or of
    config.json if it names none. Late updates are finished first. Raises ConfigError or BatchError.
    """
    drawing = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    require_request(prompts, max_new_tokens, num_samples)
    ends = engine.eos_token_ids if eos_token_ids is None else frozenset(eos_token_ids)
    asked = [tuple(prompt) for prompt in prompts for _ in range(num_samples)]
    found = continuations(engine, asked, max_new_tokens, ends, drawing)
    return [
        Rollout(
            prompt=prompt,
            tokens=tuple(made.tokens),
            logprobs=tuple(made.logprobs),
            ended=made.tokens[-1] in ends,
        )
        for prompt, made in zip(asked, found, strict=True)
    ]


def require_request(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, num_samples: int
) -> None:
    """Raise BatchError or ConfigError unless there is something to generate."""
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise BatchError(f"prompt {number} has no tokens; begin it with a token, like BOS")
    for name, value in (("max_new_tokens", max_new_tokens), ("num_samples", num_samples)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; give 1 or more.")
