"""Laws of generation.py."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

import megatrain as mt
from megatrain.errors import BatchError, ConfigError

PROMPTS = ([5, 6, 7, 8], [9, 10], [11, 12, 13])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3,
        pad_token_id=0, eos_token_id=[1, 2], bos_token_id=3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


@pytest.fixture
def engine(folder: Path) -> Iterator[mt.Engine]:
    home = mt.load_model(folder, dtype="fp32")
    with mt.Engine(home.decoder, home.store) as engine:
        yield engine


def test_greedy_answers_are_those_of_transformers(folder: Path, engine: mt.Engine) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder)
    found = mt.generate(engine, PROMPTS, max_new_tokens=8, temperature=0)
    for prompt, rollout in zip(PROMPTS, found, strict=True):
        whole = plain.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        assert rollout.prompt == tuple(prompt)
        assert list(rollout.tokens) == whole[0, len(prompt) :].tolist()
        assert rollout.ended == (rollout.tokens[-1] in (1, 2))


def test_an_answer_ends_with_the_tokens_of_the_config_or_those_given(engine: mt.Engine) -> None:
    found = mt.generate(engine, PROMPTS, max_new_tokens=40, num_samples=8, temperature=2.0)
    assert all(set(one.tokens[:-1]).isdisjoint({1, 2}) for one in found)
    assert {one.tokens[-1] in (1, 2) for one in found if one.ended} == {True}
    assert any(one.ended for one in found)
    endless = mt.generate(
        engine, PROMPTS, max_new_tokens=40, num_samples=8, temperature=2.0, eos_token_ids=()
    )
    assert {(len(one.tokens), one.ended) for one in endless} == {(40, False)}


def _greedy(folder: Path, **settings: Any) -> list[mt.Rollout]:
    home = mt.load_model(folder, dtype="fp32")
    with mt.Engine(home.decoder, home.store) as engine:
        return mt.generate(engine, PROMPTS, max_new_tokens=12, temperature=0, **settings)


def test_an_answer_ends_with_the_tokens_of_generation_config(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    free = _greedy(folder, eos_token_ids=())
    ends = {one.tokens[3] for one in free}
    GenerationConfig(eos_token_id=sorted(ends)).save_pretrained(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for prompt, rollout in zip(PROMPTS, _greedy(tmp_path / "model"), strict=True):
        whole = plain.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert list(rollout.tokens) == whole[0, len(prompt) :].tolist()
        assert rollout.ended
        assert len(rollout.tokens) <= 4
    # With the ends of config.json alone the answers would be others.
    others = _greedy(tmp_path / "model", eos_token_ids=[1, 2])
    assert any(len(one.tokens) > 4 for one in others)


@pytest.mark.parametrize(("num_samples", "passes"), [(1, 20), (8, 20), (9, 40), (16, 40), (32, 80)])
def test_each_round_moves_all_weights_once_per_token(
    num_samples: int, passes: int, engine: mt.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.__dict__["cached_tokens"] = 8 * 40  # eight answers: prompts of 20 tokens, 20 new ones
    draw, count = engine.sample_next, itertools.count()
    monkeypatch.setattr(engine, "sample_next", lambda *given: (next(count), draw(*given))[1])
    settings: dict[str, Any] = {"max_new_tokens": 20, "num_samples": num_samples}
    mt.generate(engine, [range(5, 25)], eos_token_ids=(), **settings)
    assert next(count) == passes


def test_samples_are_drawn_by_themselves_and_again_by_the_same_seed(engine: mt.Engine) -> None:
    first, again, other = (
        mt.generate(engine, PROMPTS, max_new_tokens=6, num_samples=4, seed=seed)
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert [one.prompt for one in first] == [tuple(p) for p in PROMPTS for _ in range(4)]
    assert len({one.tokens for one in first}) > 8


def _apart(engine: mt.Engine, temperature: float) -> float:
    """Return how far log-probabilities of answers at 0.7 are from the model's at a temperature."""
    drawn: dict[str, Any] = {"num_samples": 4, "temperature": 0.7, "top_p": 0.9, "seed": 5}
    largest = 0.0
    for one in mt.generate(engine, PROMPTS, max_new_tokens=6, **drawn):
        ids = torch.tensor([[*one.prompt, *one.tokens]])
        micro = mt.MicroBatch(input_ids=ids, labels=ids)
        (known,) = engine.logprobs([micro], temperature=temperature)
        own = known[0, len(one.prompt) - 1 : -1]
        largest = max(largest, float((own - torch.tensor(one.logprobs)).abs().max()))
    return largest


def test_log_probabilities_are_those_of_the_model_at_the_temperature(engine: mt.Engine) -> None:
    assert _apart(engine, 0.7) < 1e-5


def test_log_probabilities_at_another_temperature_would_be_noticed(engine: mt.Engine) -> None:
    assert _apart(engine, 1.0) > 0.1


@pytest.mark.parametrize(
    ("prompts", "settings", "error", "message"),
    [
        ([[1], []], {}, BatchError, "prompt 1 has no tokens"),
        ([[1]], {"max_new_tokens": 0}, ConfigError, "max_new_tokens is 0; give 1 or more"),
        ([[1]], {"num_samples": 0}, ConfigError, "num_samples is 0; give 1 or more"),
        ([[1]], {"temperature": -1.0}, ConfigError, "temperature is -1"),
        ([[64]], {}, BatchError, "token 64 in input_ids is outside the vocabulary of 64"),
    ],
)
def test_what_cannot_be_generated_is_refused(
    prompts: Any, settings: dict[str, Any], error: Any, message: str, engine: mt.Engine
) -> None:
    with pytest.raises(error, match=message):
        mt.generate(engine, prompts, **{"max_new_tokens": 2, **settings})
