"""Runs that learn from a teacher: it is asked once, and resuming changes no bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.errors import CheckpointMismatch, ConfigError
from megatrain.run.evaluation import teaching
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of, differences, lines_of, run, write_model

pytestmark = pytest.mark.usefixtures("cache_in_world")


def write_teacher(folder: Path, **changes: Any) -> Path:
    """Write a model of another width and depth, with the tokenizer of the student."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3}
    write_model(folder, 0.0, seed=1, **{**sizes, "initializer_range": 0.2, **changes})
    return folder


@pytest.fixture(scope="module")
def teacher(world: Path) -> Path:
    return write_teacher(world / "teacher")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of documents of each pass of a teacher."""
    found: list[int] = []
    real = teaching.write_scores

    def counted(engine: Any, documents: Any, *given: Any, **named: Any) -> None:
        found.append(len(documents.lengths))
        real(engine, documents, *given, **named)

    monkeypatch.setattr(teaching, "write_scores", counted)
    return found


def taught(world: Path, at: Path, teacher: Path, **loss: Any) -> Config:
    given = {"name": "distill", "teacher": str(teacher), "top_k": 8} | loss
    return config_of(world, at, Setting(dtype="fp32"), loss=given)


@pytest.mark.merge
def test_a_second_and_a_resumed_run_have_the_bits_of_the_first_without_a_pass(
    world: Path, teacher: Path, tmp_path: Path, passes: list[int]
) -> None:
    state = run(taught(world, tmp_path / "whole", teacher))
    assert state is not None
    whole = state, tmp_path / "whole"
    assert len(passes) == 1
    config = taught(world, tmp_path / "died", teacher)
    run(config, die=5)
    resumed = run(config, resume=True)
    assert len(passes) == 1, "the cache has it"
    assert differences(world, resumed, tmp_path / "died", whole) == []
    run(taught(world, tmp_path / "other", teacher, temperature=2.0))
    assert len(passes) == 2
    died = taught(world, tmp_path / "lost", teacher)
    run(died, die=5)
    for path in world.rglob("teacher-*.bin"):
        path.unlink()
    again = run(died, resume=True)
    assert len(passes) == 3, "computed again"
    assert differences(world, again, tmp_path / "lost", whole) == []


@pytest.mark.merge
def test_the_student_comes_nearer_to_the_teacher(
    world: Path, teacher: Path, tmp_path: Path
) -> None:
    run(taught(world, tmp_path, teacher, divergence="jsd", top_k=1000))
    losses = [line["loss"] for line in lines_of(tmp_path) if "loss" in line]
    judged = [line["eval_loss"] for line in lines_of(tmp_path) if "eval_loss" in line]
    assert losses[-1] < 0.9 * losses[0]
    assert judged[-1] < 0.9 * judged[0]


@pytest.mark.merge
def test_another_teacher_under_the_same_name_is_refused(world: Path, tmp_path: Path) -> None:
    folder = write_teacher(tmp_path / "teacher")
    config = taught(world, tmp_path / "run", folder)
    run(config, die=5)
    write_teacher(folder, initializer_range=0.1)
    with pytest.raises(CheckpointMismatch, match=r"^loss\.teacher: .* has changed since the run"):
        run(config, resume=True)


def test_another_vocabulary_is_refused_by_name(world: Path, teacher: Path, tmp_path: Path) -> None:
    wide = write_teacher(tmp_path / "wide", vocab_size=400)
    with pytest.raises(ConfigError, match=r"^loss\.teacher: .*wide has logits for 400 tokens and "):
        Trainer(taught(world, tmp_path / "run", wide))
    other = write_teacher(tmp_path / "other")
    path = other / "tokenizer.json"
    fields = json.loads(path.read_text())
    vocabulary = fields["model"]["vocab"]
    first, second = sorted(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"^loss\.teacher: .*other has another vocabulary: the "):
        Trainer(taught(world, tmp_path / "run", other))


def test_keys_of_a_teacher_need_the_loss_and_the_loss_a_teacher() -> None:
    given: dict[str, Any] = {"model": "m", "data": "d"}
    with pytest.raises(ConfigError, match=r"distill needs a teacher"):
        Config.model_validate(given | {"loss": {"name": "distill"}})
    with pytest.raises(ConfigError, match=r"top_k belongs to distill, and the loss is dpo"):
        Config.model_validate(given | {"loss": {"name": "dpo", "top_k": 5}})
