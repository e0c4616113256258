"""Laws of sampling.py."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from megatrain.memory.layout import Kind, build_layout
from megatrain.memory.store import Store
from megatrain.models.decoder import build_decoder
from megatrain.pipeline.engine import Engine
from megatrain.sampling import continue_texts

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    initializer_range=0.3,
    pad_token_id=0,
    eos_token_id=None,
    bos_token_id=1,
)
PROMPTS = ([5, 6, 7, 8], [9, 10], [11, 12, 13])
NO_END: frozenset[int] = frozenset()


@functools.cache
def model() -> PreTrainedModel:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()


def engine() -> Engine:
    decoder = build_decoder(CONFIG, "fp32")
    store = Store(build_layout(decoder.blocks))
    for param in decoder.params:
        store.param(param.name, Kind.HI).copy_(model().get_parameter(param.name).detach())
    return Engine(decoder, store)


def generated(prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    whole = model().generate(ids, max_new_tokens=num_tokens, do_sample=False)
    return [int(token) for token in whole[0, len(prompt) :]]


def test_greedy_text_is_that_of_transformers() -> None:
    with engine() as ours:
        found = continue_texts(ours, PROMPTS, 8, NO_END)
    assert found == [generated(prompt, 8) for prompt in PROMPTS]


def test_a_row_that_has_ended_stays_and_the_others_go_on() -> None:
    whole = [generated(prompt, 8) for prompt in PROMPTS]
    end = whole[0][2]
    with engine() as ours:
        found = continue_texts(ours, PROMPTS, 8, frozenset({end}))
    for row, text in zip(found, whole, strict=True):
        until = text.index(end) + 1 if end in text else 8
        assert row == text[:until]


@pytest.mark.parametrize("seed", [0, 1])
def test_drawn_text_is_the_same_for_the_same_seed(seed: int) -> None:
    with engine() as ours:
        first, second = (
            continue_texts(ours, PROMPTS, 6, NO_END, temperature=1.5, seed=seed) for _ in range(2)
        )
        other = continue_texts(ours, PROMPTS, 6, NO_END, temperature=1.5, seed=seed + 7)
    assert first == second != other
