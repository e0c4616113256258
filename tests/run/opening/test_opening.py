"""Opening a run: nothing is read or built twice, and typing errors are found first."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megatrain.disk.hf.model import ModelFolder
from megatrain.errors import ConfigError, DataError
from megatrain.models import build
from megatrain.models import config_json as model_config
from megatrain.run.opening import opening
from megatrain.run.opening.model import load_tokenizer
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of, run, write_world


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count what parses a config.json and what builds a skeleton, wherever they are called."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def counting(*args: Any, **settings: Any) -> Any:
            calls[name] += 1
            return original(*args, **settings)

        monkeypatch.setattr(owner, name, counting)

    count(model_config, "_check_single")
    count(build, "build_skeleton")
    count(AutoTokenizer, "from_pretrained")
    return calls


ONCE = {"_check_single": 1, "build_skeleton": 1, "from_pretrained": 1}


@pytest.mark.parametrize("resumes", [False, True])
def test_config_is_read_and_the_skeleton_built_once(
    tmp_path: Path, counted: Counter[str], resumes: bool
) -> None:
    write_world(tmp_path)
    config = config_of(tmp_path, tmp_path / "run", Setting(save_every=1))
    if resumes:
        run(config, die=2)
        counted.clear()
    Trainer(config).close()
    assert counted == ONCE


def _steps_in_docs(text: str) -> list[tuple[str, str]]:
    section = text.partition("## How a run opens")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `(\w+)` \(`(\w+)\.py`\): ", section, re.M)


def _steps_in_code() -> list[tuple[str, str]]:
    """The functions whose results `open_run` takes, in order, and their modules."""
    function = ast.parse(inspect.getsource(opening.open_run)).body[0]
    lines = next(node for node in ast.walk(function) if isinstance(node, ast.With)).body
    calls = [line.value for line in lines if isinstance(line, ast.Assign)]
    names = [re.sub(r"^opened\.enter_context\(", "", ast.unparse(call)) for call in calls]
    found = [name.partition("(")[0] for name in names]
    return [(name, getattr(opening, name).__module__.rpartition(".")[2]) for name in found]


def test_the_docs_list_the_steps_in_order() -> None:
    text = (Path(__file__).parents[3] / "docs" / "engine.md").read_text()
    assert _steps_in_docs(text) == _steps_in_code()
    assert len(_steps_in_code()) <= 13


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": {"frozen": ["model.embd*"]}}, r"model\.frozen: model\.embd\* matches no param"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_before_weights_are_read(
    tmp_path: Path, changes: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_world(tmp_path)
    monkeypatch.setattr(ModelFolder, "load", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=text):
        Trainer(config_of(tmp_path, tmp_path / "run", Setting(), **changes))
    assert not (tmp_path / "run").exists()


def test_a_refused_run_leaves_a_folder_that_was_there(tmp_path: Path) -> None:
    write_world(tmp_path)
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="matches no param"):
        Trainer(config_of(tmp_path, tmp_path / "run", Setting(), model={"frozen": ["model.embd*"]}))
    assert (tmp_path / "run").is_dir()


TEMPLATE = (
    "{% for m in messages %}{{ m.role + said + m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' + said }}{% endif %}"
)


@pytest.mark.merge
def test_a_template_of_the_config_is_trained_with_and_exported(tmp_path: Path) -> None:
    write_world(tmp_path)
    template = {"chat_template": TEMPLATE, "template_kwargs": {"said": " says: "}}
    config = config_of(tmp_path, tmp_path / "run", Setting(save_every=1), data=template)
    assert run(config, die=2) is None
    run(config, resume=True)
    saved = sorted((tmp_path / "run").glob("*/step-*/model"))
    assert load_tokenizer(saved[-1]).chat_template == TEMPLATE
    samples = (tmp_path / "run" / "samples.jsonl").read_text()
    assert "assistant says: " in samples


def test_an_argument_that_no_template_reads_is_refused(tmp_path: Path) -> None:
    write_world(tmp_path)
    config = config_of(
        tmp_path, tmp_path / "run", Setting(), data={"template_kwargs": {"enable_thinkin": False}}
    )
    with pytest.raises(DataError, match="does not read enable_thinkin"):
        Trainer(config)
