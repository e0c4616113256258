"""Merged weights: base plus product, rounded once, in either layout of a weight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatrain.disk.hf.model import load_model
from megatrain.errors import ConfigError
from megatrain.memory.kinds import Kind
from megatrain.memory.master import split_into
from megatrain.models.adapters.lora import Lora
from testkit.families import save_tiny

LORA = Lora(rank=3, alpha=5, rslora=True)


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
            hi = home.store.param(param.name, Kind.HI)
            if dtype == "fp32":
                hi.copy_(masters[param.name])
            else:
                split_into(masters[param.name], hi, home.store.param(param.name, Kind.LO))
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
