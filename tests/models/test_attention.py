"""Attention answered by us: heard where a model attends, and transformers untouched otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from megatrain.models.attention import attention_replaced
from testkit.families import tiny_config


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "falcon", "gpt2"])
def test_attention_that_is_passed_on_gives_the_bits_of_the_model(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32).eval()
    ids = torch.arange(3, 19)[None]
    calls = []

    def hear(own: Any, *args: Any, **options: Any) -> Any:
        calls.append(args[0])
        return own(*args, **options)

    with torch.no_grad():
        expected = model(input_ids=ids).logits
        with attention_replaced(hear):
            found = model(input_ids=ids).logits
    assert torch.equal(found, expected)
    assert len(calls) in (0, model.config.num_hidden_layers)


def test_transformers_has_its_own_functions_after_a_failure() -> None:
    before = dict(AttentionInterface._global_mapping)

    def hear(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    def fail() -> None:
        with attention_replaced(hear):
            AttentionInterface._global_mapping["sdpa"](torch.nn.Identity(), *[torch.ones(1)] * 3)

    with pytest.raises(ZeroDivisionError):
        fail()
    assert AttentionInterface._global_mapping == before
