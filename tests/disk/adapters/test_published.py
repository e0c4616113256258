"""Laws of published.py: a quantized folder with adapters in it, in its own form."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatrain import HostModel
from megatrain.disk.adapters.published import Rounding
from megatrain.disk.hf.model import read_model_folder
from megatrain.errors import ConfigError
from megatrain.memory.kinds import Kind
from megatrain.models.adapters.lora import Lora
from testkit.families import save_tiny
from testkit.quantized import FILE, dequantized, save_fp8, save_int4, save_mxfp4

KINDS = (Kind.HI, Kind.LO)
LORA = Lora(rank=4, alpha=8, targets=("q_proj", "up_proj"))
FORMS: dict[str, Callable[[Path], Any]] = {
    "blocks": lambda folder: save_fp8(folder, "llama", (16, 32)),
    "one scale": lambda folder: save_fp8(folder, "llama", None),
    "exponents": lambda folder: save_fp8(folder, "llama", (16, 16), "ue8m0"),
}


def _trained(folder: Path, lora: Lora = LORA) -> HostModel:
    """Return a model whose adapters add something."""
    home = read_model_folder(folder, lora=lora).load(KINDS)
    random = torch.Generator().manual_seed(1)
    for param in home.decoder.params:
        if param.name.endswith("lora_B"):
            weight = home.store.param(param.name, Kind.HI)
            weight.copy_(torch.randn(param.shape, generator=random) * 0.02)
    return home


def _wide(folder: Path) -> dict[str, Tensor]:
    home = read_model_folder(folder).load((Kind.HI,))
    return {param.name: home.store.weight(param.name) for param in home.decoder.params}


@pytest.mark.parametrize("form", FORMS)
def test_what_no_adapter_changes_has_every_byte(form: str, tmp_path: Path) -> None:
    FORMS[form](tmp_path / "base")
    home = _trained(tmp_path / "base")
    rounding = home.export(tmp_path / "merged", merge=True, as_published=True)
    before, after = (load_file(tmp_path / name / FILE) for name in ("base", "merged"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        same = torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (tensor, after[name])))
        assert same != bool(re.search(r"(q|up)_proj\.weight(_scale_inv)?$", name)), name
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape)
    assert rounding is not None
    assert 0 < rounding.squares < 0.002 * rounding.weights


@pytest.mark.parametrize("form", FORMS)
def test_transformers_loads_the_weights_within_the_printed_error(form: str, tmp_path: Path) -> None:
    FORMS[form](tmp_path / "base")
    home = _trained(tmp_path / "base")
    home.export(tmp_path / "wide", merge=True)
    rounding = home.export(tmp_path / "merged", merge=True, as_published=True)
    assert rounding is not None
    loaded, wanted = dequantized(tmp_path / "merged"), _wide(tmp_path / "wide")
    again = Rounding()
    for name, weight in wanted.items():
        if re.search(r"(q|up)_proj", name):
            again.add(loaded[name], weight, weight)
        else:
            assert torch.equal(loaded[name], weight)
    assert again.num_params == rounding.num_params
    assert again.squares == pytest.approx(rounding.squares, rel=1e-6)
    assert re.search(r"with an error of 2\.\d\d% of their norm", str(rounding))


def test_plain_weights_of_a_quantized_folder_are_merged_as_ever(tmp_path: Path) -> None:
    save_mxfp4(tmp_path / "base")
    home = _trained(tmp_path / "base", Lora(rank=4, alpha=8, targets=("q_proj",)))
    home.export(tmp_path / "wide", merge=True)
    rounding = home.export(tmp_path / "merged", merge=True, as_published=True)
    assert str(rounding) == "no quantized tensor has an adapter, so nothing was rounded"
    loaded, wanted = dequantized(tmp_path / "merged"), _wide(tmp_path / "wide")
    assert all(torch.equal(loaded[name], weight) for name, weight in wanted.items())


@pytest.mark.parametrize("form", ["mxfp4", "fp8"])
def test_experts_with_adapters_are_rounded_in_their_form(form: str, tmp_path: Path) -> None:
    if form == "fp8":
        save_fp8(tmp_path / "base", "qwen3_moe", (16, 16))
    else:
        save_mxfp4(tmp_path / "base")
        tensors = load_file(tmp_path / "base" / FILE)
        for name in tensors:
            if name.endswith("_scales"):
                tensors[name].clamp_(110, 118)
        save_file(tensors, tmp_path / "base" / FILE, metadata={"format": "pt"})
    home = _trained(tmp_path / "base", Lora(rank=2, alpha=4, params=("all-experts",)))
    home.export(tmp_path / "wide", merge=True)
    rounding = home.export(tmp_path / "merged", merge=True, as_published=True)
    assert rounding is not None
    narrow = [param for param in home.decoder.params if param.form]  # all have adapters
    assert any("experts" in param.name for param in narrow)
    assert rounding.num_params == sum(param.num_elements for param in narrow)
    loaded, wanted = dequantized(tmp_path / "merged"), _wide(tmp_path / "wide")
    again = Rounding()
    for param in narrow:
        again.add(loaded[param.name], wanted[param.name], wanted[param.name])
    assert again.squares == pytest.approx(rounding.squares, rel=1e-6)
    assert 0 < again.squares < 0.04 * again.weights


def test_what_cannot_be_written_so_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "plain", "llama", torch.bfloat16)
    with pytest.raises(ConfigError, match="is not quantized"):
        _trained(tmp_path / "plain").export(tmp_path / "no", merge=True, as_published=True)
    save_int4(tmp_path / "int4")
    with pytest.raises(ConfigError, match="packed int4 is not written"):
        _trained(tmp_path / "int4", Lora(rank=4, alpha=8)).export(
            tmp_path / "no", merge=True, as_published=True
        )
