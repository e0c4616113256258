"""The table of known models: as large as their makers say, found by the names people use."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import ConfigError
from megatrain.planning.catalog.known_models import KnownModel, find_known_model, known_models

MODELS = known_models()
WRITER: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "docs/known_models.py"))
ROWS = {row.name: row for row in WRITER["table"]()}


def test_the_catalog_has_the_models_of_the_table() -> None:
    assert [model.name for model in MODELS] == list(ROWS)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", ROWS)
def test_the_catalog_has_the_skeleton_of_each_model(name: str) -> None:
    lines = WRITER["CATALOG"].read_text().splitlines()
    (written,) = [line for line in lines if line.startswith(f'{{"name": "{name}"')]
    assert written == WRITER["line_of"](ROWS[name]), "run: python docs/known_models.py"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_params_are_those_published(model: KnownModel) -> None:
    assert model.shape.params == pytest.approx(model.published_params, rel=0.01)


def test_active_params_are_those_in_the_names() -> None:
    for name, active in (
        ("Qwen/Qwen3-30B-A3B", 3.3e9),
        ("Qwen/Qwen3-235B-A22B", 22e9),
        ("deepseek-ai/DeepSeek-V3", 37e9),
        ("moonshotai/Kimi-K2-Instruct", 32e9),
        ("openai/gpt-oss-120b", 5.7e9),
    ):
        shape = find_known_model(name).shape
        assert shape.active_params == pytest.approx(active, rel=0.03), name


def test_logits_that_a_family_caps_or_scales_are_counted() -> None:
    for name, copies in (("gemma-2-9b", 5), ("c4ai-command-r-v01", 3), ("qwen3-8b", 0)):
        assert find_known_model(name).shape.logit_copies == copies, name


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("Qwen3-30B-A3B-Thinking-2507", "Qwen/Qwen3-30B-A3B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("google/gemma-3-27b-it", "google/gemma-3-27b-pt"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-V3"),
        ("unsloth/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"),
    ],
)
def test_names_are_found_as_people_write_them(asked: str, found: str) -> None:
    assert find_known_model(asked).name == found


def test_every_model_is_found_by_its_own_name() -> None:
    assert [find_known_model(model.name).name for model in MODELS] == [
        model.name for model in MODELS
    ]


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (
            "Qwen/Qwen3-9B",
            "Qwen/Qwen3-9B is not a folder, a file or a known model. Did you mean ",
        ),
        ("lama-3.1-8b", "Did you mean .*meta-llama/Llama-3.1-8B"),
        ("xyz", f"lists the {len(MODELS)} known models; or give the path of a config.json"),
    ],
)
def test_an_unknown_name_is_refused_with_what_comes_near(asked: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        find_known_model(asked)


def test_a_hostile_name_is_quoted_short() -> None:
    with pytest.raises(ConfigError) as info:
        find_known_model("x\x1b[31m" * 10_000)
    assert len(str(info.value)) < 2000
    assert "\x1b" not in str(info.value)
