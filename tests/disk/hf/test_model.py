"""Folders as they are published: with code of their own, by other names, with more heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatrain import load_model
from megatrain.disk.checkpoint.parts import checkpoint_parts
from megatrain.errors import ModelConfigError, WeightsMismatch
from megatrain.planning.catalog.asked_models import find_shape
from testkit.families import save_tiny, tiny_model
from testkit.quantized import FILE, edit, save_fp8

CODE = {"AutoConfig": "configuration_own.C", "AutoModelForCausalLM": "modeling_own.M"}


def _published(folder: Path, **changes: Any) -> Path:
    """Save a tiny DeepSeek-V3 whose config.json has `changes`; return the folder."""
    path = save_tiny(folder, "deepseek_v3") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("changes", [{}, {"model_type": "kimi_k2"}])
def test_a_folder_with_code_of_its_own_is_loaded_and_exported_as_the_family(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    plain = _published(tmp_path / "plain")
    source = _published(tmp_path / "source", auto_map=CODE, **changes)
    load_model(source).export(tmp_path / "export")
    fields = json.loads((tmp_path / "export" / "config.json").read_text())
    assert "auto_map" not in fields
    assert fields["model_type"] == "deepseek_v3"
    expected = AutoModelForCausalLM.from_pretrained(plain).state_dict()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert find_shape(str(source)).blocks == find_shape(str(plain)).blocks


def test_a_name_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="'kimi_k9' is not a causal language model"):
        load_model(_published(tmp_path / "source", model_type="kimi_k9"))


def _spare_names(family: str) -> list[str]:
    """Return names of heads as folders of the family have them; the model has four layers."""
    return {
        "deepseek_v3": ["model.layers.4.eh_proj.weight", "model.layers.4.mlp.up_proj.weight"],
        "glm4_moe": ["model.layers.4.eh_proj.weight", "model.layers.4.enorm.weight"],
        "qwen3_next": ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"],
    }[family]


def _with_spare_heads(folder: Path, family: str) -> dict[str, torch.Tensor]:
    """Save a tiny model of `family` with heads behind its layers; return their tensors."""
    tiny_model(family, torch.bfloat16).save_pretrained(folder)
    random = torch.Generator().manual_seed(1)
    dtypes = (torch.bfloat16, torch.float32)
    spare = {
        name: torch.randn((24, 8), generator=random).to(dtype)
        for name, dtype in zip(_spare_names(family), dtypes, strict=True)
    }
    save_file(load_file(folder / FILE) | spare, folder / FILE, metadata={"format": "pt"})
    edit(folder, num_nextn_predict_layers=1)
    return spare


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(
        name in found and found[name].dtype is one.dtype and torch.equal(found[name], one)
        for name, one in expected.items()
    )


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_heads_for_several_tokens_keep_their_bytes(family: str, tmp_path: Path) -> None:
    spare = _with_spare_heads(tmp_path / "source", family)
    load_model(tmp_path / "source").export(tmp_path / "export")
    load_model(tmp_path / "export").export(tmp_path / "again")
    for folder in ("export", "again"):
        assert _same(load_file(tmp_path / folder / FILE), spare)
    assert json.loads((tmp_path / "again/config.json").read_text())["num_nextn_predict_layers"] == 1
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert _same(found, AutoModelForCausalLM.from_pretrained(tmp_path / "source").state_dict())


def test_a_head_that_changed_would_be_noticed(tmp_path: Path) -> None:
    spare = _with_spare_heads(tmp_path / "source", "deepseek_v3")
    name = next(iter(spare))
    spare[name].view(torch.int16)[0, 0] ^= 1
    load_model(tmp_path / "source").export(tmp_path / "export")
    assert not _same(load_file(tmp_path / "export" / FILE), spare)


def test_a_layer_that_config_json_does_not_announce_is_surplus(tmp_path: Path) -> None:
    _with_spare_heads(tmp_path / "source", "deepseek_v3")
    edit(tmp_path / "source", num_nextn_predict_layers=0)
    with pytest.raises(WeightsMismatch, match=r"2 tensors are not in the model: model\.layers\.4"):
        load_model(tmp_path / "source")


def test_a_checkpoint_has_the_heads(tmp_path: Path) -> None:
    spare = _with_spare_heads(tmp_path / "source", "deepseek_v3")
    model = load_model(tmp_path / "source")
    assert {tensor.name for tensor in model.beside} == spare.keys()
    (carried,) = checkpoint_parts(model).carried
    assert {tensor.name for tensor in carried.tensors} == spare.keys()


def test_quantized_heads_are_written_as_loading_would_dequantize_them(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_fp8(source, "deepseek_v3", num_hidden_layers=3)
    tensors = load_file(source / FILE)
    given = {name: t for name, t in tensors.items() if name.startswith("model.layers.2.self_attn")}
    spare = {name.replace("layers.2", "layers.3"): t.clone() for name, t in given.items()}
    save_file(tensors | spare, source / FILE, metadata={"format": "pt"})
    edit(source, num_nextn_predict_layers=1)
    load_model(source).export(tmp_path / "export")
    found = load_file(tmp_path / "export" / FILE)
    assert not [name for name in found if name.endswith("_scale_inv")]
    heads = {name: t for name, t in found.items() if name.startswith("model.layers.3.")}
    assert len(heads) == len([name for name in spare if not name.endswith("_scale_inv")])
    expected = {name: found[name.replace("layers.3", "layers.2")] for name in heads}
    assert _same(heads, expected)
