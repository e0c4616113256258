"""LoRA on a skeleton: which modules are adapted, what they start with, what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megatrain.errors import ConfigError
from megatrain.models.adapters.lora import AdaptedLinear, LoraConfig, adapt_layers, first_values
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from testkit.families import tiny_config

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def _adapted(family: str, *targets: str, **changes: int) -> Decoder:
    lora = LoraConfig(rank=4, alpha=8, target_modules=targets)
    return build_decoder(tiny_config(family, **changes), "bf16", lora=lora)


def _ends(decoder: Decoder) -> set[str]:
    assert decoder.adapters is not None
    return {name.rpartition(".")[2] for name in decoder.adapters.modules}


@pytest.mark.parametrize(
    ("targets", "ends"),
    [
        ((), {*ATTENTION, *FEED_FORWARD}),
        (("all-linear",), {*ATTENTION, *FEED_FORWARD}),
        (("q_proj", "v_proj"), {"q_proj", "v_proj"}),
        (("*.mlp.*",), {*FEED_FORWARD}),
        (("layers.0.self_attn.*",), {*ATTENTION}),
    ],
)
def test_targets_choose_linear_modules_of_the_layers(
    targets: tuple[str, ...], ends: set[str]
) -> None:
    assert _ends(_adapted("llama", *targets)) == ends


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "c_attn", "experts"])
def test_a_target_that_matches_none_is_refused_with_what_would_match(target: str) -> None:
    with pytest.raises(ConfigError, match=f"lora.targets: {target} matches no linear module"):
        _adapted("mixtral", target)
    with pytest.raises(ConfigError, match=r"They are: .*o_proj.*q_proj"):
        _adapted("mixtral", target)


def test_only_adapters_are_trained_and_the_model_keeps_its_names() -> None:
    plain, decoder = build_decoder(tiny_config("llama"), "bf16"), _adapted("llama")
    own = [param.name for param in decoder.params if not param.is_adapter]
    assert own == [param.name for param in plain.params]
    assert all(param.trained == param.is_adapter for param in decoder.params)
    shapes = {param.name: param.shape for param in decoder.blocks[1].params if param.is_adapter}
    assert shapes["model.layers.0.mlp.up_proj.lora_A"] == (4, 64)
    assert shapes["model.layers.0.mlp.up_proj.lora_B"] == (96, 4)


def test_a_family_with_transposed_weights_is_adapted_in_the_right_direction() -> None:
    shapes = {param.name: param.shape for param in _adapted("gpt2").params}
    assert shapes["transformer.h.0.mlp.c_fc.weight"] == (64, 96)
    assert shapes["transformer.h.0.mlp.c_fc.lora_A"] == (4, 64)
    assert shapes["transformer.h.0.mlp.c_fc.lora_B"] == (96, 4)


def test_what_cannot_be_adapted_is_named() -> None:
    adapters = _adapted("mixtral").adapters
    assert adapters is not None
    assert adapters.left_out == (
        "model.layers.*.mlp.gate.weight",
        "model.layers.*.mlp.experts.gate_up_proj",
        "model.layers.*.mlp.experts.down_proj",
    )
    named = _adapted("mixtral", "q_proj").adapters
    assert named is not None
    assert named.left_out == ()


class _Router(nn.Linear):
    """Returns more than a tensor, as routers of some families do."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return super().forward(given), given  # type: ignore[return-value]


def test_a_class_that_is_linear_by_name_alone_is_left_out() -> None:
    decoder = build_decoder(tiny_config("llama"), "bf16")
    with torch.device("meta"):
        decoder.layers[0].get_submodule("mlp").up_proj = _Router(64, 96, bias=False)
    found = adapt_layers(decoder.model, "model.layers", LoraConfig(rank=4, alpha=8))
    assert "model.layers.0.mlp.up_proj" not in found.modules
    assert "model.layers.1.mlp.up_proj" in found.modules
    assert found.left_out == ("model.layers.*.mlp.up_proj.weight",)


@pytest.mark.parametrize("rslora", [False, True])
def test_the_product_is_scaled_dropped_and_added(rslora: bool) -> None:
    lora = LoraConfig(rank=4, alpha=6, dropout=0.5, rslora=rslora)
    decoder = build_decoder(tiny_config("llama"), "fp32", lora=lora)
    module = decoder.model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(module, AdaptedLinear)
    assert isinstance(module, nn.Linear)
    weight, a, b = (torch.randn(shape) for shape in ((96, 64), (4, 64), (96, 4)))
    given = torch.randn(2, 3, 64)
    tensors = {"weight": weight, "lora_A": a, "lora_B": b}
    torch.manual_seed(3)
    found = torch.func.functional_call(module, tensors, (given,))
    torch.manual_seed(3)
    kept = nn.Dropout(0.5)(given)
    scaling = 6 / (math.sqrt(4) if rslora else 4)
    assert torch.equal(found, given @ weight.T + (kept @ a.T @ b.T) * scaling)
    module.eval()
    found = torch.func.functional_call(module, tensors, (given,))
    assert torch.equal(found, given @ weight.T + (given @ a.T @ b.T) * scaling)


def test_ranks_and_alphas_may_differ_by_name_and_the_first_match_counts() -> None:
    ranks = (("layers.1.self_attn.q_proj", 8), ("*.self_attn.*", 2))
    alphas = (("q_proj", 3.0),)
    lora = LoraConfig(rank=4, alpha=8, ranks=ranks, alphas=alphas)
    decoder = build_decoder(tiny_config("llama"), "fp32", lora=lora)
    layer = "model.layers.{}.{}"
    wanted = {
        layer.format(0, "self_attn.q_proj"): (2, 3 / 2),
        layer.format(1, "self_attn.q_proj"): (8, 3 / 8),
        layer.format(1, "self_attn.k_proj"): (2, 8 / 2),
        layer.format(1, "mlp.up_proj"): (4, 8 / 4),
    }
    for name, (rank, scaling) in wanted.items():
        module = decoder.model.get_submodule(name)
        assert isinstance(module, AdaptedLinear)
        assert (module.lora_A.shape[0], module.lora_B.shape[1]) == (rank, rank)
        assert module.lora_scaling == scaling


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_of_nothing_adapted_is_refused(key: str) -> None:
    patterns = {"ranks" if key == "rank_pattern" else "alphas": (("up_proj", 2),)}
    lora = LoraConfig(rank=4, alpha=8, target_modules=("q_proj",), **patterns)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"lora\.{key}: up_proj matches nothing .*q_proj"):
        build_decoder(tiny_config("llama"), "fp32", lora=lora)


def test_first_values_depend_on_seed_and_name_alone() -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A"
    values = first_values(name, (8, 400), 1)
    assert torch.equal(values, first_values(name, (8, 400), 1))
    assert not torch.equal(values, first_values(name, (8, 400), 2))
    assert not torch.equal(values, first_values(name.replace("0", "1"), (8, 400), 1))
    bound = 1 / math.sqrt(400)  # of PEFT: kaiming uniform with a = sqrt(5)
    assert 0.99 * bound < values.abs().max() <= bound
    assert abs(float(values.var()) - bound**2 / 3) < 0.05 * bound**2
    assert not first_values(name.replace("_A", "_B"), (400, 8), 1).any()
