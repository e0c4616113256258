"""Folders as they are published: with code of their own, and by other names of their family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain import load_model
from megatrain.errors import ModelConfigError
from megatrain.planning.catalog.asked_models import find_shape
from testkit.families import save_tiny

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


def test_transformers_does_not_load_the_source_without_its_code(tmp_path: Path) -> None:
    source = _published(tmp_path / "source", auto_map=CODE, model_type="kimi_k2")
    with pytest.raises(ValueError, match="custom code"):
        AutoConfig.from_pretrained(source, trust_remote_code=False)


def test_a_name_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="'kimi_k9' is not a causal language model"):
        load_model(_published(tmp_path / "source", model_type="kimi_k9"))
