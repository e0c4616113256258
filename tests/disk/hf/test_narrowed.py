"""Laws of narrowed.py: bits of the base as it is widened at load, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatrain import HostModel
from megatrain.choices import BaseForm
from megatrain.disk.hf import load as load_module
from megatrain.disk.hf.model import ModelFolder, read_model_folder
from megatrain.disk.hf.narrowed import BASE_KEY, recorded, recording
from megatrain.errors import ConfigError, ModelConfigError, WeightsMismatch
from megatrain.memory.kinds import TensorKind
from megatrain.models.adapters.lora import LoraConfig
from megatrain.ranks.ownership import Owner
from testkit.families import save_tiny
from testkit.quantized import FILE, save_fp8, save_int4, save_mxfp4

KINDS = (TensorKind.HI, TensorKind.LO)
LORA = LoraConfig(rank=4, alpha=8)
PUBLISHED: dict[str, Callable[[Path], Any]] = {
    "fp8": save_fp8,
    "fp8 of one scale": lambda folder: save_fp8(folder, "llama", None),
    "fp8 of experts": lambda folder: save_fp8(folder, "qwen3_moe", (16, 16), "ue8m0"),
    "mxfp4": save_mxfp4,
    "int4": save_int4,
}


def _read(folder: Path, base: BaseForm) -> ModelFolder:
    return read_model_folder(folder, lora=LORA, base=base)


def _narrow(home: HostModel) -> list[str]:
    return [param.name for param in home.decoder.params if param.form]


@pytest.mark.parametrize("form", PUBLISHED)
def test_a_base_as_published_has_the_bits_of_loading_it_wide(form: str, tmp_path: Path) -> None:
    PUBLISHED[form](tmp_path)
    wide, narrow = _read(tmp_path, "bf16").load(KINDS), _read(tmp_path, "auto").load(KINDS)
    assert narrow.form == "as_published"
    assert _narrow(wide) == []
    names = _narrow(narrow)
    assert len(names) >= 6
    assert all(torch.equal(narrow.store.weight(n), wide.store.weight(n)) for n in names)
    others = set(wide.store.layout.places) - set(names)
    assert all(torch.equal(narrow.store.weight(n), wide.store.weight(n)) for n in others)
    assert narrow.store.arena(TensorKind.HI).nbytes < wide.store.arena(TensorKind.HI).nbytes


@pytest.mark.parametrize("form", ["fp8", "mxfp4"])
def test_one_changed_byte_would_be_noticed(form: str, tmp_path: Path) -> None:
    PUBLISHED[form](tmp_path)
    narrow = _read(tmp_path, "auto").load(KINDS)
    name = _narrow(narrow)[0]
    before = narrow.store.weight(name)
    narrow.store.narrow(name)[3] ^= 8
    assert not torch.equal(narrow.store.weight(name), before)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_linear_layers_and_experts_are_rounded_and_nothing_else(
    family: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, family, torch.bfloat16)
    wide, home = _read(folder, "bf16").load(KINDS), _read(folder, "nf4").load(KINDS)
    names = set(_narrow(home))
    matrices = {
        param.name
        for block in home.decoder.blocks[1:-1]
        for param in block.params
        if len(param.shape) > 1 and not param.is_adapter and not param.name.endswith("gate.weight")
    }
    assert names == matrices
    for param in home.decoder.params:
        found, wanted = (one.store.weight(param.name).float() for one in (home, wide))
        near = (found - wanted).norm() < 0.13 * wanted.norm()
        assert near if param.name in names else torch.equal(found, wanted)


def test_a_quantized_folder_is_rounded_from_its_weights(tmp_path: Path) -> None:
    save_fp8(tmp_path / "fp8")
    plain = read_model_folder(tmp_path / "fp8", lora=LORA, base="bf16").load(KINDS)
    plain.export(tmp_path / "wide", merge=True)
    one, two = (_read(tmp_path / name, "nf4").load(KINDS) for name in ("fp8", "wide"))
    assert _narrow(one) == _narrow(two) != []
    assert torch.equal(one.store.arena(TensorKind.HI), two.store.arena(TensorKind.HI))


@pytest.mark.few(1)
@pytest.mark.parametrize(("form", "base"), [*((f, "auto") for f in PUBLISHED), ("plain", "nf4")])
def test_ranks_have_the_bytes_of_one(
    form: str, base: BaseForm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "plain":
        save_tiny(tmp_path, "qwen3_moe", torch.bfloat16)
    else:
        PUBLISHED[form](tmp_path)
    folder = _read(tmp_path, base)
    alone = folder.load(KINDS)
    monkeypatch.setattr(load_module, "READ_BYTES", 4096)
    homes = [folder.load(KINDS, owner=Owner(rank, 3)) for rank in range(3)]
    for name in _narrow(alone):
        together = torch.cat([home.store.narrow(name) for home in homes])
        assert torch.equal(together, alone.store.narrow(name))


def test_what_is_presumed_is_what_is_found(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    folder = _read(tmp_path, "auto")
    assert folder.decoder.blocks == folder.load(KINDS).decoder.blocks


def test_what_is_trained_is_never_narrow(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    home = read_model_folder(tmp_path, base="as_published").load(KINDS)
    assert _narrow(home) == []


def test_damaged_values_are_named(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    tensors = load_file(tmp_path / FILE)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name].view(torch.uint8)[0, 0] = 0x7F
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(WeightsMismatch, match=rf"{name} times .* is not finite"):
        _read(tmp_path, "auto").load(KINDS)


def test_mxfp4_is_not_rounded_again(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    with pytest.raises(ConfigError, match=r"Set model\.base to as_published"):
        _read(tmp_path, "nf4")


def test_a_narrow_weight_is_not_taken_for_numbers(tmp_path: Path) -> None:
    save_fp8(tmp_path)
    home = _read(tmp_path, "auto").load(KINDS)
    with pytest.raises(LookupError, match="is narrow"):
        home.store.param(_narrow(home)[0], TensorKind.HI)


def test_adapters_remember_a_base_that_was_rounded(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", "llama", torch.bfloat16)
    home = _read(model, "nf4").load(KINDS)
    home.export(tmp_path / "adapters")
    again = read_model_folder(tmp_path / "adapters").load(KINDS)
    assert again.form == "nf4"
    assert torch.equal(again.store.arena(TensorKind.HI), home.store.arena(TensorKind.HI))
    assert BASE_KEY.encode() not in again.config_json
    with pytest.raises(ModelConfigError, match=f"{BASE_KEY} is 'q3'; it must be nf4"):
        recorded(b'{"%s": "q3"}' % BASE_KEY.encode())
    assert recorded(recording(b"{}", "bf16")) == (b"{}", None)


@pytest.mark.parametrize("base", ["nf4", "auto"])
def test_a_merge_has_the_weights_that_were_trained_over(base: BaseForm, tmp_path: Path) -> None:
    if base == "auto":
        save_fp8(tmp_path / "model", "qwen3_moe", (16, 16))
    else:
        save_tiny(tmp_path / "model", "qwen3_moe", torch.bfloat16)
    home = _read(tmp_path / "model", base).load(KINDS)
    home.export(tmp_path / "merged", merge=True)
    merged = read_model_folder(tmp_path / "merged").load((TensorKind.HI,))
    for param in merged.decoder.params:  # B is zero, so nothing is added
        assert torch.equal(merged.store.weight(param.name), home.store.weight(param.name))
