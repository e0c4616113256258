"""Text from a model at home: streamed forward, one token at a time for all prompts at once.

There is no cache of keys: each token is a forward pass over the whole text, and on a device all
weights cross the link for it. That is what a look at a few samples during training costs, and why
many prompts go together. To serve a model, export it.

Laws (tests/test_sampling.py)
    1. Greedy text is what transformers' `generate` gives greedily.
    2. A row that has ended stays as it is; all stop when all have ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.pipeline.batch import MicroBatch
from megatrain.pipeline.engine import Engine


def continue_texts(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    end_tokens: frozenset[int],
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Return the new tokens of each prompt, the end token included; 0 as temperature is greedy."""
    texts = [list(prompt) for prompt in prompts]
    new: list[list[int]] = [[] for _ in prompts]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_new_tokens):
        active = [n for n, made in enumerate(new) if not made or made[-1] not in end_tokens]
        if not active:
            break
        (logits,) = engine.predict([_padded([texts[n] for n in active])])
        for number, row in zip(active, logits, strict=True):
            token = _choose(row, temperature, generator)
            texts[number].append(token)
            new[number].append(token)
    return new


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    shares = torch.softmax(logits.double() / temperature, dim=0)
    return int(torch.multinomial(shares, 1, generator=generator))


def _padded(texts: Sequence[Sequence[int]]) -> MicroBatch:
    length = max(map(len, texts))
    ids = torch.zeros((len(texts), length), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    padded = bool((mask == 0).any())
    return MicroBatch(input_ids=ids, labels=ids, attention_mask=mask if padded else None)
