"""A rollout: a prompt, and an answer that a model has drawn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A prompt and an answer to it, in tokens."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """The answer, with its end token if it has one."""
    logprobs: tuple[float, ...]
    """Log-probability of each token, under the model that drew the answer, at its temperature."""
    ended: bool
    """False: the answer was cut off by the limit."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.tokens)
