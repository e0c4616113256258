"""Laws of groups: rates and decays by names, each as an optimizer of its own would have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain import AdamW, Muon, ParamGroup
from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind, store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.optim.optimizer import HostOptimizer, decays
from megatrain.optim.views import UpdateViews
from megatrain.run.opening.recipe import decide, group_notes, param_groups
from testkit.adamw_by_hand import HandAdamW
from testkit.families import tiny_config

RATE, DECAY = 1e-2, 0.1


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return build_decoder(tiny_config("llama"), "fp32")


def trained(decoder: Decoder, optimizer: HostOptimizer) -> tuple[dict[str, Tensor], Any]:
    """Return weights after two updates of a store of ones, and the gradients of each."""
    store = Store(build_layout(decoder.blocks, store_kinds(optimizer.states, waits=True)))
    for param in decoder.params:
        store.param(param.name, TensorKind.HI).fill_(1.0)
    views, given = UpdateViews(store, optimizer), []
    for number in (1, 2):
        generator = torch.Generator().manual_seed(number)
        gradients = {p.name: torch.randn(p.shape, generator=generator) for p in decoder.params}
        for param in decoder.params:
            store.param(param.name, TensorKind.GRAD).copy_(gradients[param.name])
        for segment in (s for s in store.layout.segments if s.trained):
            flat = store.segment(segment, TensorKind.GRAD)
            for span, one in views.of(segment):
                optimizer.update(one, flat[span], step=number, number=number, scale=1.0)
        given.append(gradients)
    return {p.name: store.param(p.name, TensorKind.HI).clone() for p in decoder.params}, given


def by_hand(
    decoder: Decoder, given: Any, treatment: dict[str, tuple[float, float]]
) -> dict[str, Tensor]:
    """Return the weights of one textbook AdamW for each param, with its own rate and decay."""
    found = {}
    for param in decoder.params:
        usual = (RATE, DECAY if decays(param) else 0.0)
        rate, decay = treatment.get(param.name, usual)
        hand = HandAdamW({param.name: torch.ones(param.shape)}, lr=rate, weight_decay=decay)
        for number, gradients in enumerate(given, start=1):
            hand.update({param.name: gradients[param.name]}, number)
        found[param.name] = hand.masters[param.name]
    return found


def adamw(**changes: Any) -> AdamW:
    return AdamW(learning_rate=RATE, weight_decay=DECAY, **changes)


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    return {name for name in one if not torch.equal(one[name], other[name])}


GROUPS = (
    ParamGroup(params=("*.mlp.*",), lr_ratio=0.25, weight_decay=0.3),
    ParamGroup(params=("*norm*", "*embed*"), weight_decay=0.0),
    ParamGroup(params=("*.2.self_attn.q_proj.*",), lr_ratio=4.0),
)


def test_params_of_a_group_have_its_rate_and_decay(decoder: Decoder) -> None:
    found, given = trained(decoder, adamw(groups=GROUPS))
    own = {p.name: (RATE / 4, 0.3) for p in decoder.params if ".mlp." in p.name}
    own |= {p.name: (RATE, 0.0) for p in decoder.params if "norm" in p.name or "embed" in p.name}
    own |= {"model.layers.2.self_attn.q_proj.weight": (RATE * 4, DECAY)}
    assert different(found, by_hand(decoder, given, own)) == set()
    forgotten = by_hand(decoder, given, {})
    embedding = {p.name for p in decoder.params if "embed" in p.name}
    norms = {p.name for p in decoder.params if "norm" in p.name}
    assert different(found, forgotten) == (own.keys() - norms) | embedding


def test_groups_of_all_defaults_change_no_bit(decoder: Decoder) -> None:
    plain, _ = trained(decoder, adamw())
    grouped, _ = trained(decoder, adamw(groups=(ParamGroup(params=("*",)),)))
    assert different(plain, grouped) == set()


def test_muon_moves_the_matrices_of_a_group_by_its_rate() -> None:
    """Nothing is orthogonalized here: the direction is the gradient itself."""
    decoder = build_decoder(tiny_config("llama"), "fp32")
    name = "model.layers.1.mlp.up_proj.weight"
    usual, _ = trained(decoder, Muon(learning_rate=RATE))
    slow, _ = trained(
        decoder, Muon(learning_rate=RATE, groups=(ParamGroup(params=(name,), lr_ratio=0.5),))
    )
    assert different(usual, slow) == {name}
    torch.testing.assert_close(slow[name] - 1, (usual[name] - 1) / 2, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([("*.nlp.*",)], r"optim\.groups: \*\.nlp\.\* matches no trained parameter of the model"),
        ([("*.mlp.*",), ("*up_proj*",)], "is in two groups, .*mlp.* and .*up_proj"),
    ],
)
def test_what_a_group_cannot_be_is_refused_by_name(
    decoder: Decoder, groups: list[tuple[str, ...]], words: str
) -> None:
    optimizer = adamw(groups=tuple(ParamGroup(params=params) for params in groups))
    with pytest.raises(ConfigError, match=words):
        optimizer.treated(decoder.params)


def test_a_group_of_frozen_params_is_refused() -> None:
    decoder = build_decoder(tiny_config("llama"), "bf16", frozen=("*.mlp.*",))
    with pytest.raises(ConfigError, match="matches no trained parameter"):
        adamw(groups=(ParamGroup(params=("*.mlp.*",)),)).treated(decoder.params)


# In a config.


def made(**optim: Any) -> Config:
    return Config(model="m", data="d", optim=optim)


def test_a_peak_rate_of_a_group_is_a_factor_on_that_of_the_run() -> None:
    given = [
        {"params": "*embed*", "learning_rate": 1e-6},
        {"params": ["*.mlp.*"], "times": 3, "weight_decay": 0.2},
    ]
    config = made(learning_rate=1e-5, groups=given)
    first, second = param_groups(config)
    assert first.lr_ratio == pytest.approx(0.1)
    assert second == ParamGroup(params=("*.mlp.*",), lr_ratio=3.0, weight_decay=0.2)


def test_the_rates_of_groups_are_told() -> None:
    decoder, notes = build_decoder(tiny_config("llama"), "bf16"), list[str]()
    config = made(groups=[{"params": "*embed*", "times": 0.1}])
    decide(config, decoder, None, notes)
    assert notes[1:] == [
        "group *embed*: 1 params, peak rate 1e-06 (0.1 times the others')",
    ]


def test_the_second_half_of_adapters_may_be_faster() -> None:
    """LoRA+: half of the adapters' params have sixteen times the rate."""
    decoder = build_decoder(tiny_config("llama"), "bf16", lora=LoraConfig(rank=4, alpha=8))
    config = made(learning_rate=1e-4, groups=[{"params": "*lora_B*", "times": 16}])
    halves = sum(param.is_adapter for param in decoder.params) // 2
    assert group_notes(config, decoder) == [
        f"group *lora_B*: {halves} params, peak rate 0.0016 (16 times the others')"
    ]
    treated = AdamW(learning_rate=1e-4, groups=param_groups(config)).treated(decoder.params)
    assert {name for name, one in treated.items() if one.lr_ratio == 16} == {
        param.name for param in decoder.params if param.is_adapter and "lora_B" in param.name
    }


@pytest.mark.parametrize(
    ("optim", "words"),
    [
        ({"groups": [{"params": "*", "learning_rate": 1e-5, "times": 2}]}, "Give one of them"),
        ({"groups": [{"learning_rate": 1e-5}]}, "params"),
        ({"groups": [{"params": "*", "rate": 1e-5}]}, "rate"),
    ],
)
def test_a_wrong_group_is_refused(optim: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(**optim)
