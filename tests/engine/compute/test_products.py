"""Laws of engine/compute/products.py. Drift over many steps: benchmarks/rivals/accuracy.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain.engine.compute import products
from megatrain.engine.compute.products import (
    E4M3,
    E5M2,
    MULTIPLE,
    Narrowed,
    NarrowLinear,
    NarrowWeights,
    narrow_product,
    narrow_products,
    narrowed,
    product,
    why_not_fp8,
)
from megatrain.errors import ConfigError
from megatrain.models.adapters.lora import LoraConfig, adapt_layers
from megatrain.step.ops import Op
from testkit.worlds import Case, Outcome, World, world_of

SORT = "llama of 2 layers"
NEARNESS = 0.1
"""Relative error of random products, with room: e5m2 has 2 bits behind the first."""


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


# Narrowing.


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_narrowing_keeps_the_nearest_numbers_and_scales_by_powers_of_two(form: Any) -> None:
    given = _random(64, 8) * 7.3
    values, unit = narrowed(given, form)
    assert math.frexp(float(unit))[0] == 0.5, "not a power of two"
    codes = torch.arange(256, dtype=torch.uint8).view(form.dtype).double()
    codes = codes[codes.isfinite()] * unit.double()
    nearest = (given.double()[..., None] - codes).abs().amin(-1)
    kept = (given.double() - values.double() * unit.double()).abs()
    assert torch.equal(kept, nearest)
    coarser = (given / (unit * 3)).to(form.dtype).double() * unit.double() * 3
    assert not torch.equal((given.double() - coarser).abs(), nearest)


@pytest.mark.parametrize("largest", [0.0, 1e-38, 1e-3, 447.0, 1e9, 3e38])
def test_any_finite_tensor_stays_finite(largest: float) -> None:
    given = _random(16, 16).clamp(-1, 1) * largest
    given[0, 0] = largest
    for form in (E4M3, E5M2):
        values, unit = narrowed(given, form)
        assert values.double().isfinite().all()
        found = float(values[0, 0].double() * unit)
        assert found == pytest.approx(float(given[0, 0]), rel=0.1, abs=1e-37)


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(wrong: float) -> None:
    given, weight = _random(16, 32), _random(16, 32, seed=1)
    assert narrow_product(given, weight)[0].isfinite().all()
    given[3, 5] = wrong
    assert not narrow_product(given, weight)[0].isfinite().all()


# Products.


def _three_products(given: Tensor, weight: Tensor) -> list[Tensor]:
    given, weight = given.clone().requires_grad_(), weight.clone().requires_grad_()
    output = narrow_product(given, weight)[0]
    d_output = _random(*output.shape, seed=2)
    return [output.detach(), *torch.autograd.grad(output, (given, weight), d_output)]


@pytest.mark.parametrize("tokens", [16, 37])
def test_all_three_products_are_near_those_in_fp64(tokens: int) -> None:
    given, weight = _random(tokens, 64), _random(48, 64, seed=1)
    d_output = _random(tokens, 48, seed=2)
    a, b, d = given.double(), weight.double(), d_output.double()
    for found, expected in zip(
        _three_products(given, weight), (a @ b.T, d @ b, d.T @ a), strict=True
    ):
        error = (found.double() - expected).norm() / expected.norm()
        assert 1e-4 < error < NEARNESS, "too far, or not narrow at all"


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_a_product_of_fp8_is_exact_but_for_the_order_of_its_sum(form: Any) -> None:
    left, right = narrowed(_random(24, 64), form), narrowed(_random(32, 64, seed=1), E4M3)
    exact = left.values.double() @ right.values.double().T * (left.unit * right.unit).double()
    assert torch.allclose(product(left, right, torch.float32).double(), exact, rtol=1e-5, atol=1e-5)
    off = Narrowed(left.values, left.unit * 2)
    assert not torch.allclose(product(off, right, torch.float32).double(), exact, rtol=1e-2)


def test_a_device_is_asked_by_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    assert not why_not_fp8(here)
    for error in (RuntimeError("no kernel\nstack"), NotImplementedError("sm_80"), ValueError()):
        monkeypatch.setattr(products, "product", _raising(error))
        assert why_not_fp8(here) in ("no kernel", "sm_80", "ValueError")
    monkeypatch.setattr(products, "product", _raising(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        why_not_fp8(here)


def test_a_device_that_does_not_multiply_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "why_not_fp8", lambda device: "no kernel")
    with pytest.raises(
        ConfigError, match=r"fp8, which .* does not multiply \(no kernel\)\. Set train\.products to"
    ):
        _play(products="fp8")


def _raising(error: Exception) -> Callable[..., Tensor]:
    def call(*_: Any) -> Tensor:
        raise error

    return call


# Modules.


def _narrowed_names(world: World) -> list[str]:
    model = copy.deepcopy(world.decoder.model)
    return narrow_products(model, world.decoder)


def test_linear_modules_of_layers_alone_are_narrow() -> None:
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert _narrowed_names(world_of(SORT)) == [
        f"{layer}.{name}" for layer in range(2) for name in [*attention, *mlp]
    ]
    in_layers = _narrowed_names(world_of("mixtral"))
    assert in_layers == [f"{layer}.{name}" for layer in range(2) for name in attention]
    assert _narrowed_names(world_of("gpt2, tied, with dropout")) == [], "its modules are others"
    assert _narrowed_names(world_of("llama in fp32")) == []


def test_a_router_and_a_width_that_cards_do_not_take_stay_as_they_are() -> None:
    world = world_of(SORT)
    model = copy.deepcopy(world.decoder.model)
    layer: Any = model.get_submodule("model.layers.0")
    layer.mlp.router = nn.Linear(32, 64, dtype=torch.bfloat16)
    layer.mlp.odd = nn.Linear(32, MULTIPLE + 8, dtype=torch.bfloat16)
    model.config.num_local_experts = 64
    found = narrow_products(model, world.decoder)
    assert "0.mlp.up_proj" in found
    assert not {"0.mlp.router", "0.mlp.odd"} & set(found)
    del model.config.num_local_experts
    found = narrow_products(copy.deepcopy(world.decoder.model), world.decoder)
    layer.mlp.router.__class__ = nn.Linear
    assert "0.mlp.router" in narrow_products(model, world.decoder)


def test_adapters_stay_beside_a_narrow_base() -> None:
    world = world_of(SORT)
    model = copy.deepcopy(world.decoder.model).to_empty(device="cpu")
    adapt_layers(model, "model.layers", LoraConfig(rank=4, alpha=8.0))
    module: Any = model.get_submodule("model.layers.0.mlp.up_proj")
    with torch.no_grad():
        for number, param in enumerate(module.parameters()):
            param.copy_(_random(*param.shape, seed=number))
    given = _random(5, 32, seed=9)
    plain = module(given)
    narrow_products(model, world.decoder)
    assert NarrowLinear in type(module).__mro__
    base = narrow_product(given, module.weight)[0]
    added = (given @ module.lora_A.T @ module.lora_B.T) * module.lora_scaling
    assert torch.equal(module(given), base + added)
    assert not torch.equal(module(given), plain)


@pytest.mark.parametrize("shape", [(5, 32), (2, 3, 32)])
def test_a_bias_is_added_in_the_models_dtype(shape: tuple[int, ...]) -> None:
    module = nn.Linear(32, 48, dtype=torch.bfloat16)
    given = _random(*shape)
    module.__class__ = NarrowLinear
    flat = narrow_product(given.reshape(-1, 32), module.weight.detach())[0]
    expected = flat.view(*shape[:-1], 48) + module.bias
    assert torch.equal(module(given), expected)


# In the engine.

CASE = Case(sort=SORT, steps=(((2, 6), (1, 8)), ((1, 9),)), update="late")


def _play(case: Case = CASE, **changes: Any) -> Outcome:
    return world_of(case.sort).play(case, **changes)


def _near(one: Outcome, other: Outcome) -> bool:
    """Return whether losses and norms are."""
    pairs = zip(one.numbers, other.numbers, strict=True)
    return all(a == b or a == pytest.approx(b, rel=0.1) for a, b in pairs)


def test_lanes_have_the_bits_of_the_reference_and_not_those_of_plain_products() -> None:
    reference = _play(products="fp8", reference=True)
    assert _play(products="fp8").differences(reference) == []
    assert _play(products="fp8", kept_layers=1).differences(reference) == []
    assert _play(products="fp8", device=None).differences(reference) == []
    plain = _play(reference=True)
    assert plain.differences(reference)
    assert _near(plain, reference)


def test_weights_of_an_earlier_visit_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _play(products="fp8", reference=True)

    def stays(self: NarrowWeights, op: Op) -> Any:
        self._at = op.kind, op.block
        return visited(self, op)

    visited = NarrowWeights.visited
    monkeypatch.setattr(NarrowWeights, "visited", stays)
    assert _play(products="fp8", reference=True).differences(expected)


def test_tiles_narrow_each_by_its_own_largest_element() -> None:
    case = Case(sort=SORT, steps=(((1, 12),),), update="late", tile_tokens=4)
    found, whole = _play(case, products="fp8"), _play(case, products="fp8", tile_tokens=None)
    assert found.differences(_play(case, products="fp8", reference=True)) == []
    assert _near(found, whole)


@pytest.mark.merge
def test_a_graph_has_the_bits_of_the_module() -> None:
    module: Any = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    module.__class__ = NarrowLinear
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    given = _random(5, 32).requires_grad_()

    def go(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        output = call(given)
        return [output, *torch.autograd.grad(output.sum(), (given, module.weight))]

    for own, other in zip(go(compiled), go(module), strict=True):
        assert torch.equal(own, other)
