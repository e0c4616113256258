"""Evaluating a file: rows as long as the model or its run takes them, and the others counted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedConfig

from megatrain.cli.verbs import evaluate_model
from megatrain.config import Config, dump_config
from megatrain.config.sections import DataSource
from megatrain.models.config_json import parse_config
from megatrain.run.evaluation.judging import judging_config, prompts_as_trained
from megatrain.run.run_model import RunModel
from testkit.runs import Setting, config_of, write_model


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 positions."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, 0.0)
    return folder


def config_json(model: Path) -> PreTrainedConfig:
    return parse_config((model / "config.json").read_bytes())


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lengths = [5, 30, 100, 5, 7]
    lines = [json.dumps({"prompt": "a", "completion": "b" * n}) + "\n" for n in lengths]
    path.write_text("".join(lines))
    return path


def test_a_folder_is_judged_by_all_positions_of_its_model(model: Path, rows: Path) -> None:
    found = RunModel(folder=model)
    assert (
        judging_config(
            found, config_json(model), DataSource(path=str(rows)), None, None
        ).data.max_length
        == 64
    )
    assert (
        judging_config(
            found, config_json(model), DataSource(path=str(rows)), None, 32
        ).data.max_length
        == 32
    )


def test_a_run_is_judged_by_its_own_length(model: Path, rows: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tmp_path / "run", Setting(), data={"max_length": 48})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_config(config))
    found = RunModel(folder=model, run=tmp_path / "run")
    assert (
        judging_config(
            found, config_json(model), DataSource(path=str(rows)), None, None
        ).data.max_length
        == 48
    )


def test_rows_that_are_left_out_are_counted(model: Path, rows: Path) -> None:
    said = evaluate_model(model, rows, None).splitlines()
    assert said[0] == "1 of 5 rows dropped (--max-length is 64):"
    assert said[1].startswith("  1 x longer than max_length: rows.jsonl:3 (")
    assert said[-1].startswith("loss ")
    shorter = evaluate_model(model, rows, None, max_length=16).splitlines()
    assert shorter[0] == "2 of 5 rows dropped (--max-length is 16):"


@pytest.mark.parametrize(
    ("asked", "template", "kwargs"),
    [
        ({}, "its own", {}),
        ({"template_kwargs": {"enable_thinking": False}}, "its own", {"enable_thinking": False}),
        ({"chat_template": "none"}, None, {}),
        ({"chat_template": "gone.jinja"}, "its own", {}),
    ],
)
def test_prompts_are_written_as_the_run_has_read_its_rows(
    tmp_path: Path, asked: dict[str, Any], template: str | None, kwargs: dict[str, Any]
) -> None:
    """A template of the run's own is in the tokenizer it wrote; its file may be gone."""
    config = Config.model_validate({"model": "m", "data": {"train": "rows.jsonl", **asked}})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    tokenizer = SimpleNamespace(chat_template="its own")
    model = RunModel(folder=tmp_path / "model", step=1, run=tmp_path)
    assert prompts_as_trained(model, tokenizer) == kwargs
    assert tokenizer.chat_template == template
    assert prompts_as_trained(RunModel(folder=tmp_path), SimpleNamespace()) == {}
