"""Heads that score texts: read, kept and exported as transformers' own models."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from megatrain import load_model
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind
from megatrain.models.adapters.lora import LoraConfig
from testkit.families import save_tiny

SCORE_WEIGHT = "score.weight"


@pytest.mark.parametrize("num_labels", [1, 3])
def test_an_export_loads_without_a_warning(
    num_labels: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path / "base", "llama", torch.float32)
    home = load_model(tmp_path / "base", dtype="fp32", num_labels=num_labels)
    home.export(tmp_path / "made")
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("error")
        model, report = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / "made", output_loading_info=True
        )
    assert (caplog.text, [*report["missing_keys"], *report["unexpected_keys"]]) == ("", [])
    assert model.score.weight.shape[0] == model.config.num_labels == num_labels
    again = load_model(tmp_path / "made", dtype="fp32")
    for param in home.decoder.params:
        one, other = (each.store.param(param.name, TensorKind.HI) for each in (home, again))
        assert torch.equal(one, other)


def test_a_new_head_is_trained_and_saved_beside_adapters(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "llama", torch.float32)
    home = load_model(
        tmp_path / "base", dtype="fp32", num_labels=1, lora=LoraConfig(rank=2, alpha=4)
    )
    assert [p.name for p in home.decoder.params if p.trained and not p.is_adapter] == [SCORE_WEIGHT]
    home.store.param(SCORE_WEIGHT, TensorKind.HI).fill_(0.5)
    home.export(tmp_path / "made")
    config = json.loads((tmp_path / "made" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    found = load_file(tmp_path / "made" / "adapter_model.safetensors")
    assert bool((found[f"base_model.model.{SCORE_WEIGHT}"] == 0.5).all())
    again = load_model(tmp_path / "made", dtype="fp32")
    assert bool((again.store.param(SCORE_WEIGHT, TensorKind.HI) == 0.5).all())


def test_adapters_of_a_model_with_a_head_are_not_those_of_a_language_model(tmp_path: Path) -> None:
    """PEFT's class for these would ask the model for what generates."""
    save_tiny(tmp_path / "base", "llama", torch.float32)
    load_model(tmp_path / "base", dtype="fp32", num_labels=2).export(tmp_path / "scores")
    home = load_model(tmp_path / "scores", dtype="fp32", lora=LoraConfig(rank=2, alpha=4))
    home.export(tmp_path / "made")
    config = json.loads((tmp_path / "made" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == (None, None)
    assert not hasattr(AutoModelForSequenceClassification.from_pretrained(tmp_path / "scores"),
                       "prepare_inputs_for_generation")  # fmt: skip
    load_model(tmp_path / "made", dtype="fp32")


def test_a_head_that_is_there_keeps_the_names_of_its_labels(tmp_path: Path) -> None:
    save_tiny(tmp_path / "base", "llama", torch.float32)
    load_model(tmp_path / "base", dtype="fp32", num_labels=2).export(tmp_path / "made")
    path = tmp_path / "made" / "config.json"
    named = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    home = load_model(tmp_path / "made", dtype="fp32", num_labels=2)
    assert json.loads(home.config_json)["id2label"] == named["id2label"]
    with pytest.raises(ConfigError, match=r"^num_labels is 3, and the model has 2 .*"):
        load_model(tmp_path / "made", num_labels=3)


def test_no_label_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    with pytest.raises(ConfigError, match=r"^num_labels is 0; give 1 for a reward, or more .*"):
        load_model(tmp_path, num_labels=0)
