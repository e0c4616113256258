"""Laws of models/experts.py."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from megatrain.models import experts
from megatrain.models.decoder import has_experts
from megatrain.models.experts import count_on_host

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    # More experts than pairs of a token and an expert: some have no rows.
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=16, num_experts=32, num_experts_per_tok=2
    ),
}
IDS = torch.arange(14).view(2, 7)


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    names, params = zip(*model.named_parameters(), strict=True)
    loss = model(input_ids=IDS, labels=IDS).loss
    found = torch.autograd.grad(loss, params, allow_unused=True)
    return {"loss": loss.detach()} | {
        name: grad for name, grad in zip(names, found, strict=True) if grad is not None
    }


def _asks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    asked: list[int] = []
    ask = experts.ask_device

    def counted(offsets: Tensor) -> list[int]:
        asked.append(len(offsets))
        return ask(offsets)

    monkeypatch.setattr(experts, "ask_device", counted)
    return asked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_the_bits_of_torch_and_one_question_in_a_forward(
    family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=dtype)
    counted = copy.deepcopy(model)
    count_on_host(counted)
    asked = _asks(monkeypatch)
    expected = _gradients(model)
    assert asked == []
    found = _gradients(counted)
    assert len(asked) == 2, "each layer asks once, for forward and backward"
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_another_grouping_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["mixtral"], dtype=torch.float32)
    expected = _gradients(model)
    count_on_host(model)
    ask = experts.ask_device
    monkeypatch.setattr(experts, "ask_device", lambda offsets: ask((offsets - 1).clamp(min=0)))
    found = _gradients(model)
    assert not torch.equal(found["loss"], expected["loss"])


def test_a_model_without_experts_stays_as_it_is() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    assert not has_experts(model)
    before = model.get_experts_implementation()
    count_on_host(model)
    assert model.get_experts_implementation() == before
