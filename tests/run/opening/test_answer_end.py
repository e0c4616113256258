"""The end of an answer in a chat template is an end of the model that is trained on it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, GenerationConfig

from megatrain.cli.exporting import export_model
from megatrain.config import Config
from megatrain.model_files import GENERATION_NAME
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of
from testkit.written import write

ANSWER, TEXT = 1, 7
"""What the template ends an answer with, and what the files of the model end a text with."""


pytestmark = pytest.mark.usefixtures("cache_in_world")


@pytest.fixture
def model(world: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(world / "model-0.0", folder)
    for name in ("config.json", GENERATION_NAME):
        about = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(about | {"eos_token_id": TEXT}))
    return folder


def config(world: Path, model: Path, steps: int = 1, **changes: Any) -> Config:
    given = {
        "model": {"name_or_path": str(model)},
        "data": {"eval": None},
        "eval": {"every": None, "samples": 0},
        "train": {"steps": steps},
        "optim": {"warmup": 0},
    }
    return config_of(world, model.parent / "run", Setting(), **(given | changes))


def ended(config: Config, *, resume: bool = False) -> tuple[list[str], frozenset[int]]:
    """Train; return what was said of ends, and the ends of texts that are drawn."""
    with Trainer(config) as trainer:
        trainer.train(resume_from_checkpoint=resume)
        said = [note for note in trainer.notes if "ends an answer" in note]
        return said, trainer.engine.eos_token_ids


def ends_of(model: Path) -> Any:
    """What transformers ends a text by."""
    return AutoModelForCausalLM.from_pretrained(model).generation_config.eos_token_id


@pytest.mark.parametrize("has_file", [True, False])
def test_exports_end_where_answers_of_the_rows_end(
    world: Path, model: Path, tmp_path: Path, has_file: bool
) -> None:
    before = GenerationConfig.from_pretrained(model)
    if not has_file:
        (model / GENERATION_NAME).unlink()
    assert ends_of(model) == TEXT
    (said,), ends = ended(config(world, model))
    assert f"{GENERATION_NAME} of the exported model names it" in said
    assert ends == {TEXT, ANSWER}
    export_model(tmp_path / "run", tmp_path / "out")
    assert ends_of(tmp_path / "out") == [TEXT, ANSWER]
    after = GenerationConfig.from_pretrained(tmp_path / "out").to_dict()
    for name in after.keys() - {"eos_token_id"} if has_file else ("bos_token_id", "pad_token_id"):
        assert after[name] == getattr(before, name), name


def test_a_model_that_ends_there_stays_as_it_is(world: Path, model: Path, tmp_path: Path) -> None:
    path = model / GENERATION_NAME
    path.write_text(json.dumps({"eos_token_id": [TEXT, ANSWER], "temperature": 0.5}))
    assert ended(config(world, model)) == ([], frozenset({TEXT, ANSWER}))
    export_model(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / GENERATION_NAME).read_bytes() == path.read_bytes()


def test_rows_that_no_template_writes_add_no_end(world: Path, model: Path, tmp_path: Path) -> None:
    rows = write(tmp_path / "plain.jsonl", [{"prompt": "1 +", "completion": " 1"}] * 8)
    data = {"chat_template": "none", "train": str(rows), "eval": None}
    assert ended(config(world, model, data=data)) == ([], frozenset({TEXT}))


def test_adapters_name_the_token_to_stop_at(world: Path, model: Path, tmp_path: Path) -> None:
    """Servers take the ends of their base."""
    (said,), ends = ended(config(world, model, lora={"rank": 2}))
    assert "Served over their base, adapters need it as a stop token" in said
    assert ends == {TEXT, ANSWER}
    export_model(tmp_path / "run", tmp_path / "out", merge=True)
    assert ends_of(tmp_path / "out") == [TEXT, ANSWER]


def test_a_resumed_run_has_the_end_and_says_it_once(world: Path, model: Path) -> None:
    first, ends = ended(config(world, model))
    assert len(first) == 1
    assert ended(config(world, model, steps=2), resume=True) == ([], ends)
