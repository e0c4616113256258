"""Laws of policy.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import megatrain as mt
from megatrain.rewards.policy import OwnPolicy, Policy

PROMPTS = ([5, 6, 7, 8], [9, 10])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3,
        pad_token_id=0, eos_token_id=1, bos_token_id=3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def test_answers_are_those_of_the_weights_of_the_last_update(folder: Path) -> None:
    policy: Policy = OwnPolicy()
    with pytest.raises(AssertionError, match="update comes first"):
        policy.draw(PROMPTS, max_new_tokens=4)
    home = mt.load_model(folder, dtype="fp32")
    optimizer = mt.AdamW(learning_rate=0.1)
    with mt.Engine(
        home.decoder, home.store, optimizer=optimizer, loss=mt.PolicyGradient()
    ) as engine:

        def drawn(version: int) -> list[mt.Rollout]:
            policy.update(engine, home, version)
            asked: dict[str, Any] = {"max_new_tokens": 6, "num_samples": 3, "seed": 7}
            found = policy.draw(PROMPTS, **asked)
            assert found == mt.generate(engine, PROMPTS, **asked)
            return found

        first = drawn(0)
        assert [one.prompt for one in first] == [tuple(PROMPTS[n // 3]) for n in range(6)]
        engine.step(mt.rollout_batch(first, [1.0, -1.0, 0.0] * 2))
        assert drawn(1) != first
    policy.close()
    policy.close()
