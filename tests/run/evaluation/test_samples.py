"""Which tokens end a text, and that every verb that lets a model write knows them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from megatrain.cli import verbs
from megatrain.cli.verbs import sample_from
from megatrain.disk.hf.model import load_model
from megatrain.errors import ConfigError
from megatrain.run.evaluation.samples import eos_token_ids
from megatrain.run.opening.model import load_tokenizer
from testkit.runs import write_model, write_world
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched
from testkit.tokenizers_of_kinds import tokenizer_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which the tokenizer ends texts by 1, and generation_config.json by 7 and 9 too."""
    made = tmp_path_factory.mktemp("model")
    write_model(made, 0.0)
    GenerationConfig(eos_token_id=[7, 9]).save_pretrained(made)
    return made


@pytest.mark.parametrize(("own", "expected"), [(1, {1, 7, 9}), (7, {7, 9}), (None, {7, 9})])
def test_the_tokenizers_end_ends_a_text_beside_those_of_the_model(
    folder: Path, own: int | None, expected: set[int]
) -> None:
    tokenizer = SimpleNamespace(eos_token_id=own, chat_template=None)
    assert eos_token_ids(tokenizer, load_model(folder)) == expected


def test_the_end_of_an_answer_ends_a_text_where_no_file_names_it(folder: Path) -> None:
    """Base models end a text by another token than their chat template ends an answer by."""
    phi = tokenizer_of("phi")
    assert phi.eos_token == "<|endoftext|>"
    ends = {7, 9, phi.eos_token_id, phi.convert_tokens_to_ids("<|end|>")}
    assert eos_token_ids(phi, load_model(folder)) == ends


def test_an_export_keeps_them(folder: Path, tmp_path: Path) -> None:
    load_model(folder).export(tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [7, 9]


def test_sampling_computes_on_the_device_that_training_would_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator = Simulator(policy="late")
    expected = sample_from(folder, ["1 + 1"], 3, device="cpu")
    monkeypatch.setattr(
        "megatrain.devices.accelerator.TorchRuntime.find",
        lambda name, local_rank: simulator if not name else None,
    )
    monkeypatch.setattr(Simulator, "device", "simulated", raising=False)
    with watched(simulator):
        assert sample_from(folder, ["1 + 1"], 3) == expected
    assert simulator.num_tasks > 0
    assert simulator.races == []
    assert simulator.failures == []


def test_evaluation_computes_on_the_device_that_training_would_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is only read has no gradients to pin."""
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    write_world(tmp_path)
    model, rows = tmp_path / "model-0.0", tmp_path / "rows.jsonl"
    expected = verbs.evaluate_model(model, rows, 5, answers=True)
    simulator = Simulator(policy="late")
    monkeypatch.setattr("megatrain.devices.accelerator.TorchRuntime.find", lambda *_: simulator)
    monkeypatch.setattr(Simulator, "device", "simulated", raising=False)
    with watched(simulator):
        assert verbs.evaluate_model(model, rows, 5, answers=True) == expected
    assert "exact answers" in expected
    assert simulator.num_tasks > 0
    assert simulator.races == []
    assert simulator.failures == []


def test_a_system_prompt_without_a_template_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_template(path: Path) -> Any:
        tokenizer = load_tokenizer(path)
        tokenizer.chat_template = None
        return tokenizer

    monkeypatch.setattr(verbs, "load_tokenizer", without_template)
    with pytest.raises(ConfigError, match="--system: the tokenizer has no chat template"):
        sample_from(folder, ["1 + 1"], 3, system="Add.")
