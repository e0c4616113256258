"""Merged weights: base plus product, rounded once, in either layout of a weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatrain.disk.hf.model import load_model
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind
from megatrain.memory.master import split_into
from megatrain.models.adapters.lora import LoraConfig
from testkit.families import save_tiny

LORA = LoraConfig(rank=3, alpha=5, rslora=True)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_merged_experts_are_base_plus_the_products_of_each(tmp_path: Path, family: str) -> None:
    """mixtral's folder has a file tensor for each expert's half, gpt_oss one for all experts."""
    base = save_tiny(tmp_path / "base", family, torch.float32)
    lora = LoraConfig(
        rank=3, alpha=5, target_modules=("experts",), target_parameters=("all-experts",)
    )
    home = load_model(base, dtype="fp32", lora=lora)
    draw = torch.Generator().manual_seed(1)
    for param in home.decoder.params:
        if param.is_adapter:
            home.store.param(param.name, TensorKind.HI).copy_(
                torch.randn(param.shape, generator=draw)
            )
    home.export(tmp_path / "merged", merge=True)
    merged = load_model(tmp_path / "merged", dtype="fp32")
    assert home.decoder.adapters is not None
    for param in merged.decoder.params:
        expected = home.store.param(param.name, TensorKind.HI)
        if param.name in home.decoder.adapters.params:
            a, b = (home.store.param(f"{param.name}_lora_{half}", TensorKind.HI) for half in "AB")
            form = "o r e, e r i -> e i o" if family == "gpt_oss" else "o r e, e r i -> e o i"
            expected = expected + 5 / 3 * torch.einsum(
                form, b.view(b.shape[0], 3, 4), a.view(4, 3, a.shape[1])
            )
            assert not torch.allclose(
                expected, home.store.param(param.name, TensorKind.HI), atol=0.1
            )
        found = merged.store.param(param.name, TensorKind.HI)
        assert torch.allclose(found, expected, atol=1e-4), param.name


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_a_weight_merged_by_dora_has_rows_of_the_magnitudes(tmp_path: Path, family: str) -> None:
    base = save_tiny(tmp_path / "base", family, torch.float32)
    home = load_model(base, dtype="fp32", lora=LoraConfig(rank=3, alpha=5, dora=True))
    draw = torch.Generator().manual_seed(1)
    for param in home.decoder.params:
        if param.is_adapter:
            drawn = torch.rand(param.shape, generator=draw)
            home.store.param(param.name, TensorKind.HI).copy_(drawn)
    home.export(tmp_path / "merged", merge=True)
    merged = load_model(tmp_path / "merged", dtype="fp32")
    assert home.decoder.adapters is not None
    for module in home.decoder.adapters.modules:
        held = home.store.param
        parts = (held(f"{module}.{n}", TensorKind.HI) for n in ("weight", "lora_A", "lora_B"))
        weight, a, b = parts
        whole = (weight.T if family == "gpt2" else weight) + 5 / 3 * b @ a
        magnitude = held(f"{module}.lora_magnitude_vector", TensorKind.HI)
        expected = whole * (magnitude / whole.norm(dim=1))[:, None]
        found = merged.store.param(f"{module}.weight", TensorKind.HI)
        found = found.T if family == "gpt2" else found
        assert torch.allclose(found, expected, atol=1e-5), module
        assert torch.allclose(found.norm(dim=1), magnitude, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_merged_weight_is_base_plus_product(tmp_path: Path, family: str, dtype: str) -> None:
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    base = save_tiny(tmp_path / "base", family, kind)
    home = load_model(base, dtype=dtype, lora=LORA)  # type: ignore[arg-type]
    draw, masters = torch.Generator().manual_seed(1), {}
    for param in home.decoder.params:
        if param.is_adapter:
            masters[param.name] = torch.randn(param.shape, generator=draw)
            hi = home.store.param(param.name, TensorKind.HI)
            if dtype == "fp32":
                hi.copy_(masters[param.name])
            else:
                split_into(masters[param.name], hi, home.store.param(param.name, TensorKind.LO))
    home.export(tmp_path / "merged", merge=True)
    plain, merged = _tensors(base), _tensors(tmp_path / "merged")
    assert plain.keys() == merged.keys()
    num_changed = 0
    for name, weight in plain.items():
        module = name.removesuffix(".weight")
        full = module if module in _modules(masters) else f"transformer.{module}"
        expected = weight.clone()
        if full in _modules(masters):
            product = masters[f"{full}.lora_B"] @ masters[f"{full}.lora_A"]
            expected += (product.T if family == "gpt2" else product) * (5 / 3**0.5)
            num_changed += 1
        assert torch.equal(merged[name], expected), name
    assert num_changed == len(masters) / 2 > 0
    again = load_model(tmp_path / "merged", dtype=dtype)  # type: ignore[arg-type]
    assert again.decoder.adapters is None


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def _modules(masters: dict[str, torch.Tensor]) -> set[str]:
    return {name.rpartition(".")[0] for name in masters}


def test_a_model_without_adapters_is_not_merged(tmp_path: Path) -> None:
    home = load_model(save_tiny(tmp_path / "base", "llama"))
    with pytest.raises(ConfigError, match="there are no adapters to merge"):
        home.export(tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()
