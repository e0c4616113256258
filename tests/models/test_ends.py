"""Tokens that end a text: those by which transformers ends it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from megatrain.disk.hf.model import read_model_folder
from megatrain.errors import ModelFolderError
from megatrain.model_files import GENERATION_NAME
from megatrain.models.build import named_ends
from testkit.families import save_tiny
from testkit.joint_families import tiny_joint_config


@pytest.mark.parametrize(
    ("generation", "config_end", "expected"),
    [
        ({"eos_token_id": [7, 9]}, 2, {7, 9}),
        ({"eos_token_id": 7}, 2, {7}),
        ({}, 2, {2}),
        ({"eos_token_id": None}, 2, {2}),
        (None, [2, 3], {2, 3}),
        (None, None, set()),
        ({"eos_token_id": "</s>"}, None, set()),
        ({"eos_token_id": [True, 7]}, None, {7}),
    ],
)
def test_generation_config_comes_before_config(
    generation: dict[str, object] | None, config_end: object, expected: set[int]
) -> None:
    assert named_ends(LlamaConfig(eos_token_id=config_end), generation) == expected


def test_a_joint_model_may_name_them_in_its_text_part() -> None:
    config = tiny_joint_config("gemma3")
    own, text = getattr(config, "eos_token_id", None), config.text_config.eos_token_id
    assert named_ends(config) == {text if own is None else own}


def test_transformers_ends_a_text_there_too(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.float32, eos_token_id=2)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = torch.tensor([[5, 6, 7]])
    free = plain.generate(prompt, max_new_tokens=6, do_sample=False)[0, 3:].tolist()
    GenerationConfig(eos_token_id=[300, free[2]]).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    ended = plain.generate(prompt, max_new_tokens=6, do_sample=False)[0, 3:].tolist()
    ends = read_model_folder(tmp_path).decoder.eos_token_ids
    assert ends == {300, free[2]}
    assert ended == free[: 1 + next(n for n, token in enumerate(free) if token in ends)]
    assert len(ended) < len(free)


@pytest.mark.parametrize(
    ("data", "says"), [("{", "is not valid JSON"), ("[]", "is a list, not an object")]
)
def test_a_broken_generation_config_is_named(tmp_path: Path, data: str, says: str) -> None:
    save_tiny(tmp_path, "llama")
    (tmp_path / GENERATION_NAME).write_text(data)
    with pytest.raises(ModelFolderError, match=rf"generation_config\.json {says}"):
        read_model_folder(tmp_path)
