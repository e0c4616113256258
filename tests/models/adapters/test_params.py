"""Adapters beside params: products without the sum, gradients, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.errors import ConfigError
from megatrain.models.adapters.lora import LoraConfig, first_values
from megatrain.models.adapters.params import AdaptedParams, AdaptedWeight, adapt_param
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.models.experts import _KnownGroups
from testkit.families import tiny_config

EXPERTS, WIDE, NARROW, RANK = 4, 24, 16, 3
OFFSETS = torch.tensor([2, 2, 5, 7], dtype=torch.int32)


def _experts(family: str, *params: str, **changes: Any) -> Decoder:
    lora = LoraConfig(rank=RANK, alpha=6, target_modules=("o_proj",), target_parameters=params)
    return build_decoder(tiny_config(family, **changes), "fp32", lora=lora)


@pytest.mark.parametrize(
    ("family", "shape", "a", "b"),
    [
        ("mixtral", (4, 192, 64), (12, 64), (192, 12)),
        ("gpt_oss", (4, 64, 192), (12, 64), (192, 12)),  # keeps (experts, in, out), and says so
        ("llama4_text", (4, 64, 192), (12, 192), (64, 12)),  # and does not
    ],
)
def test_adapters_of_experts_have_the_shapes_of_peft(
    family: str, shape: tuple[int, ...], a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    decoder = _experts(family, "all-experts")
    found = {p.name.partition(".experts.")[2]: p for p in decoder.blocks[2].params}
    assert found["gate_up_proj"].shape == shape
    assert (found["gate_up_proj_lora_A"].shape, found["gate_up_proj_lora_B"].shape) == (a, b)
    assert found["gate_up_proj_lora_A"].is_adapter
    assert not found["gate_up_proj"].trained


def test_params_are_chosen_by_name_or_all_at_once() -> None:
    adapters = _experts("mixtral", "experts.down_proj", "layers.1.mlp.gate.weight").adapters
    assert adapters is not None
    down = [f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(4)]
    assert adapters.params == (*down[:1], "model.layers.1.mlp.gate.weight", *down[1:])
    every = _experts("deepseek_v3", "all-experts").adapters
    assert every is not None
    assert len(every.params) == 2 * 3
    assert all(".experts." in name for name in every.params)


@pytest.mark.parametrize(
    ("family", "name", "says"),
    [
        ("llama", "all-experts", r"lora\.experts: the layers in model\.layers have no experts"),
        ("mixtral", "w1", r"lora\.experts: w1 matches no matrix .*mlp\.experts\.gate_up_proj"),
    ],
)
def test_a_name_that_matches_nothing_is_refused(family: str, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        _experts(family, name)


def _weight(*, transposed: bool = False, dims: int = 3) -> tuple[AdaptedWeight, list[Tensor]]:
    draw = torch.Generator().manual_seed(2)
    shape = (EXPERTS, WIDE, NARROW)[3 - dims :]
    leaves = [
        torch.randn(size, generator=draw, requires_grad=True)
        for size in (shape, (*shape[:-1], RANK), (*shape[:-2], RANK, NARROW))
    ]
    weight, left, right = leaves
    adapted = AdaptedWeight(weight, left, right, 0.7)
    return (adapted.mT if transposed else adapted), leaves


ROWS = (7, NARROW)
PRODUCTS: dict[str, tuple[Callable[[Tensor, Any], Tensor], tuple[int, ...], bool]] = {
    "linear": (lambda x, w: F.linear(x, w[1]), ROWS, False),
    "linear, number as a tensor": (lambda x, w: F.linear(x, w[torch.tensor(2)]), ROWS, False),
    "matmul": (lambda x, w: x @ w[0].mT, ROWS, False),
    "bmm": (lambda x, w: torch.bmm(x, w), (EXPERTS, 7, NARROW), True),
    "some experts": (lambda x, w: torch.bmm(x, w[1:3]), (2, 7, NARROW), True),
    "groups": (lambda x, w: F.grouped_mm(x, w, offs=OFFSETS), ROWS, True),
    "transposed": (lambda x, w: F.grouped_mm(x, w.transpose(-2, -1), offs=OFFSETS), ROWS, False),
}  # fmt: skip


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the largest tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not func.is_view:
            self.elements = max(self.elements, made.numel())
        return made


def _value_and_gradients(product: Callable[[Tensor, Any], Tensor], given: Tensor, weight: Any,
                         leaves: list[Tensor]) -> list[Tensor]:  # fmt: skip
    output = product(given, weight)
    factor = torch.arange(output.numel()).view(output.shape).sin()
    return [output, *torch.autograd.grad((output * factor).sum(), [given, *leaves[1:]])]


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_the_sum_and_makes_nothing_of_its_size(name: str) -> None:
    product, shape, transposed = PRODUCTS[name]
    given = torch.randn(shape, requires_grad=True)
    weight, leaves = _weight(transposed=transposed)
    leaves[0].requires_grad_(False)
    with _Largest() as largest:  # type: ignore[no-untyped-call]
        found = _value_and_gradients(product, given, weight, leaves)
    assert largest.elements < leaves[0].numel()
    expected = _value_and_gradients(product, given, weight.whole(), leaves)
    for mine, true in zip(found, expected, strict=True):
        assert torch.allclose(mine, true, rtol=1e-5, atol=1e-5)
    wrong = AdaptedWeight(weight.weight, weight.left, weight.right, 0.7001)
    others = _value_and_gradients(product, given, wrong, leaves)
    assert not torch.allclose(others[0], expected[0], rtol=1e-5, atol=1e-5), "it is noticed"


def test_what_is_not_a_product_gets_the_sum() -> None:
    weight, (plain, left, right) = _weight()
    whole = plain + left @ right * 0.7
    operations: list[Callable[[Any], Tensor]] = [
        torch.relu,
        lambda w: w.sum(0),
        lambda w: w[:, 0],
        lambda w: w.transpose(0, 1),
    ]
    for of in operations:
        assert torch.allclose(of(weight), of(whole), atol=1e-5)
    matrix, _ = _weight(dims=2)
    assert torch.allclose(matrix[0], matrix.whole()[0])
    assert (weight.shape, weight.dtype, weight.device) == (whole.shape, whole.dtype, whole.device)


def test_groups_that_the_host_knows_are_those_of_torch() -> None:
    given = torch.randn(7, NARROW, requires_grad=True)
    weight, leaves = _weight(transposed=True)

    def product(x: Tensor, w: Any) -> Tensor:
        return F.grouped_mm(x, w, offs=OFFSETS)

    expected = _value_and_gradients(product, given, weight, leaves)
    with _KnownGroups(SimpleNamespace(has_gate=True), None):  # type: ignore[arg-type]
        found = _value_and_gradients(product, given, weight, leaves)
    for mine, true in zip(found, expected, strict=True):
        assert torch.allclose(mine, true, rtol=1e-5, atol=1e-5)


class _OneExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty((2, 5, 4), device="meta"))

    def forward(self, given: Tensor) -> Tensor:
        if given.dim() != 2:
            raise ValueError("rows")
        return F.linear(given, self.weight[1])


def test_a_module_has_its_own_params_again() -> None:
    module = _OneExpert()
    adapt_param(module, "weight", 2, 0.5)
    assert isinstance(module, AdaptedParams)
    own = module.weight
    shapes = {name: param.shape for name, param in module.named_parameters()}
    assert shapes == {"weight": (2, 5, 4), "weight_lora_A": (4, 4), "weight_lora_B": (5, 4)}
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    given = torch.randn(3, 4)
    a = values["weight_lora_A"][2:]  # expert by expert
    b = values["weight_lora_B"][:, 1::2]  # rank by rank
    found = functional_call(module, values, (given,))
    assert torch.allclose(found, given @ (values["weight"][1] + 0.5 * b @ a).T, atol=1e-5)
    assert module.weight is own
    with pytest.raises(ValueError, match="rows"):
        functional_call(module, values, (given[None],))
    assert module.weight is own


def test_first_values_are_drawn_for_all_experts_and_leave_the_base() -> None:
    name = "model.layers.0.mlp.experts.down_proj_lora_A"
    values = first_values(name, (EXPERTS * 8, 400), 1)
    assert 0.99 / 20 < values.abs().max() <= 1 / 20
    assert not first_values(name.replace("_A", "_B"), (400, 8), 1).any()
