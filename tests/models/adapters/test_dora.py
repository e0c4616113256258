"""DoRA: a magnitude for each row of W + s B A, with norms that have no gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.func import functional_call

from megatrain.errors import ConfigError
from megatrain.models.adapters.lora import MAGNITUDE, AdaptedLinear, LoraConfig
from megatrain.models.build import build_decoder
from testkit.families import tiny_config

LORA = LoraConfig(rank=4, alpha=6, dora=True)
MODULES = {
    "llama": "model.layers.0.mlp.up_proj",
    "qwen2": "model.layers.0.self_attn.q_proj",  # with a bias
    "gpt2": "transformer.h.0.mlp.c_fc",  # (in, out), and a bias
}


def _tensors(module: AdaptedLinear) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(param.shape, generator=draw).requires_grad_()
        for name, param in module.named_parameters()
    }


def _by_hand(family: str, tensors: dict[str, Tensor], given: Tensor, scaling: float) -> Tensor:
    """Return the formula's output, with the sum as one matrix."""
    weight = tensors["weight"].T if family == "gpt2" else tensors["weight"]
    whole = weight + scaling * tensors["lora_B"] @ tensors["lora_A"]
    norms = torch.linalg.norm(whole, dim=1).detach()
    rows = (tensors[MAGNITUDE] / norms)[:, None] * whole
    return F.linear(given, rows, tensors.get("bias"))


def _gradients(output: Tensor, given: Tensor, tensors: dict[str, Tensor]) -> list[Tensor]:
    wanted = [given, *(tensors[name] for name in ("lora_A", "lora_B", MAGNITUDE))]
    return list(torch.autograd.grad(output.sin().sum(), wanted))


@pytest.mark.parametrize("family", MODULES)
def test_output_and_gradients_are_those_of_the_formula(family: str) -> None:
    decoder = build_decoder(tiny_config(family), "fp32", lora=LORA)
    module = decoder.model.get_submodule(MODULES[family])
    assert isinstance(module, AdaptedLinear)
    tensors = _tensors(module)
    assert ("bias" in tensors) == (family != "llama")
    given = torch.randn(2, 3, tensors["lora_A"].shape[1], requires_grad=True)
    found = functional_call(module, tensors, (given,))
    expected = _by_hand(family, tensors, given, 6 / 4)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    pairs = zip(
        _gradients(found, given, tensors), _gradients(expected, given, tensors), strict=True
    )
    assert all(torch.allclose(mine, true, rtol=1e-3, atol=1e-3) for mine, true in pairs)
    other = _by_hand(family, tensors, given, 6 / 4 * 1.001)
    assert not torch.allclose(found, other, rtol=1e-4, atol=1e-4), "it would be noticed"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_before_the_first_update_the_model_has_the_bits_of_its_base(dtype: str) -> None:
    decoder = build_decoder(tiny_config("llama"), dtype, lora=LORA)  # type: ignore[arg-type]
    module = decoder.model.get_submodule(MODULES["llama"])
    assert isinstance(module, AdaptedLinear)
    tensors = {n: t.detach().to(module.weight.dtype) for n, t in _tensors(module).items()}
    tensors["lora_B"].zero_()
    tensors[MAGNITUDE] = torch.linalg.vector_norm(tensors["weight"], dim=1, dtype=torch.float32)
    given = torch.randn(5, 64).to(module.weight.dtype)
    found = functional_call(module, tensors, (given,))
    assert torch.equal(found, F.linear(given, tensors["weight"]))
    tensors[MAGNITUDE] *= 1.01
    assert not torch.equal(functional_call(module, tensors, (given,)), found)


def test_dropout_is_that_of_both_products() -> None:
    decoder = build_decoder(
        tiny_config("llama"), "fp32", lora=LoraConfig(rank=4, alpha=6, dora=True, dropout=0.5)
    )
    module = decoder.model.get_submodule(MODULES["llama"])
    assert isinstance(module, AdaptedLinear)
    tensors = _tensors(module)
    given = torch.randn(2, 3, tensors["lora_A"].shape[1])
    torch.manual_seed(5)
    found = functional_call(module, tensors, (given,))
    torch.manual_seed(5)
    kept = F.dropout(given, 0.5)
    changed = _by_hand("llama", tensors, kept, 6 / 4) - kept @ tensors["weight"].T
    assert torch.allclose(found, given @ tensors["weight"].T + changed, rtol=1e-4, atol=1e-3)


def test_experts_have_none() -> None:
    lora = LoraConfig(rank=4, alpha=6, dora=True, target_parameters=("all-experts",))
    with pytest.raises(ConfigError, match=r"lora\.dora is true and experts are to be adapted"):
        build_decoder(tiny_config("mixtral"), "fp32", lora=lora)


def test_adapters_in_fp32_take_their_input_up_and_give_the_dtype_of_the_model() -> None:
    decoder = build_decoder(
        tiny_config("llama"), "bf16", lora=LoraConfig(rank=4, alpha=6, fp32=True)
    )
    kinds = {param.dtype for param in decoder.params if param.is_adapter}
    assert kinds == {torch.float32}
    module = decoder.model.get_submodule(MODULES["llama"])
    weight, given = torch.randn(96, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    a, b = torch.randn(4, 64), torch.randn(96, 4)
    tensors = {"weight": weight, "lora_A": a, "lora_B": b}
    found = functional_call(module, tensors, (given,))
    exact = given.float() @ a.T @ b.T * 1.5
    assert torch.equal(found, (given @ weight.T + exact).bfloat16())
    rounded = given @ weight.T + given @ a.T.bfloat16() @ b.T.bfloat16() * 1.5
    assert not torch.equal(found, rounded)
