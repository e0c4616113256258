"""Balancing: found where the model's own code has it, and the same function of router logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral import modeling_mixtral

from megatrain.models.balance import Balancing, Routing, probability_sums
from megatrain.models.build import build_decoder
from testkit.cases import by_family
from testkit.families import BALANCED, FAMILIES, tiny_config

BALANCING = Balancing(num_experts=5, top_k=2, coefficient=0.01)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
own_loss: Any = modeling_mixtral.load_balancing_loss_func


def _logits(num_layers: int = 3, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(2 * torch.randn((8, 5), generator=generator) for _ in range(num_layers))


def _routing(logits: tuple[Tensor, ...], mask: Tensor | None) -> Routing:
    routing = Routing(BALANCING)
    for one in logits:
        routing.add([one], mask, 8 if mask is None else 6)
    return routing


@pytest.mark.parametrize("family", by_family(FAMILIES))
def test_balancing_is_found_where_the_model_has_it(family: str) -> None:
    config = tiny_config(family)
    config.output_router_logits = True
    decoder = build_decoder(config, "bf16")
    found = decoder.balancing
    assert (found is not None) == decoder.asks_balancing == (family in BALANCED)
    if found is not None:
        assert (found.num_experts, found.top_k) == (4, 2)
        assert found.coefficient > 0


def test_a_config_that_does_not_ask_is_told_from_one_that_does() -> None:
    asked = [
        build_decoder(tiny_config("mixtral", output_router_logits=asks), "bf16").asks_balancing
        for asks in (False, True)
    ]
    assert asked == [False, True]
    assert tiny_config("mixtral", output_router_logits=True).output_router_logits, "it is not ours"


def test_a_mixture_without_experts_has_nothing_to_balance() -> None:
    dense = tiny_config("qwen2_moe")
    dense.mlp_only_layers = [0, 1, 2, 3]
    assert build_decoder(dense, "bf16").balancing is None


def test_another_loss_than_ours_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(
        gate_logits: Any, num_experts: int, top_k: int = 2, attention_mask: Any = None
    ) -> Any:
        return own_loss(gate_logits, num_experts, top_k, attention_mask) * 1.001

    assert build_decoder(tiny_config("mixtral"), "bf16").balancing is not None
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", other)
    assert build_decoder(tiny_config("mixtral"), "bf16").balancing is None


@pytest.mark.parametrize(
    "changes",
    [
        {"num_local_experts": 10**12},
        {"num_experts_per_tok": 9},
        {"router_aux_loss_coef": "much"},
    ],
)
def test_a_config_that_makes_no_sense_has_no_balance_that_we_know(changes: dict[str, Any]) -> None:
    config = tiny_config("mixtral")
    for key, value in {"output_router_logits": True, **changes}.items():
        config.__dict__[key] = value
    decoder = build_decoder(config, "bf16")
    assert decoder.balancing is None
    assert decoder.asks_balancing


@pytest.mark.parametrize("mask", [None, MASK])
def test_loss_and_gradients_are_those_of_the_models_own_function(mask: Tensor | None) -> None:
    leaves = tuple(one.requires_grad_() for one in _logits())
    expected = own_loss(leaves, 5, 2, mask)
    expected_grads = torch.autograd.grad(0.3 * expected, leaves)
    with torch.no_grad():
        routing = _routing(leaves, mask)
    assert torch.equal(routing.loss(), expected)
    for leaf, expected_grad in zip(leaves, expected_grads, strict=True):
        sums = probability_sums(leaf, mask)
        assert torch.equal(torch.autograd.grad(sums, leaf, routing.d_sums(0.3))[0], expected_grad)


def test_a_layer_that_is_not_counted_is_noticed() -> None:
    logits = _logits()
    assert not torch.isclose(_routing(logits[:2], None).loss(), own_loss(logits, 5, 2), rtol=1e-4)


def test_even_use_of_experts_gives_top_k() -> None:
    """Each expert is chosen twice in five tokens, with probability 1/2 each time."""
    chosen = 40 * (torch.eye(5) + torch.eye(5).roll(1, 1))
    routing = Routing(BALANCING)
    routing.add([chosen], None, 5)
    assert float(routing.loss()) == pytest.approx(2.0)
