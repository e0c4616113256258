"""Which tokens end a text, and that every verb that lets a model write knows them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from megatrain.cli import verbs
from megatrain.cli.verbs import sample_from
from megatrain.config import Config
from megatrain.disk.hf.model import load_model
from megatrain.errors import ConfigError, NoDevice
from megatrain.run.evaluation.samples import end_tokens
from megatrain.run.opening.banner import samples_in_words, writes_after
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
    assert end_tokens(tokenizer, load_model(folder)) == expected


def test_the_end_of_an_answer_ends_a_text_where_no_file_names_it(folder: Path) -> None:
    """Base models end a text by another token than their chat template ends an answer by."""
    phi = tokenizer_of("phi")
    assert phi.eos_token == "<|endoftext|>"
    ends = {7, 9, phi.eos_token_id, phi.convert_tokens_to_ids("<|end|>")}
    assert end_tokens(phi, load_model(folder)) == ends


def test_an_export_keeps_them(folder: Path, tmp_path: Path) -> None:
    load_model(folder).export(tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [7, 9]


def test_sampling_stops_at_each_of_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def heard(engine: object, prompts: Any, most: int, ends: frozenset[int], *_: object) -> Any:
        asked.update(prompts=prompts, ends=ends)
        return [[] for _ in prompts]

    monkeypatch.setattr(verbs, "continue_texts", heard)
    sample_from(folder, ["1 + 1"], 4, system="Add.")
    tokenizer = load_tokenizer(folder)
    assert asked["ends"] == {1, 7, 9}
    assert "Add." in tokenizer.decode(asked["prompts"][0])


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


def test_a_device_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(NoDevice, match="cuda:7: "):
        sample_from(folder, ["1 + 1"], 3, device="cuda:7")


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


def config_with(samples: int, every: int | None, evaluates: bool) -> Config:
    data = {"train": "rows.jsonl", "eval": 0.1 if evaluates else None}
    judging = {"samples": samples, "every": every}
    return Config.model_validate({"model": "m", "data": data, "eval": judging})


def plan_with(**rates: Any) -> Any:
    known = bool(rates)
    return SimpleNamespace(knows_time=known, step_s=3.0, profile=SimpleNamespace(**rates))


def test_what_samples_cost_is_in_the_plan() -> None:
    """64 times 10 GB at 20 GB/s are 32 s; six times that, beside 1000 steps of 3 s, is 6 %."""
    machine = plan_with(unified=False, copy_in_bytes_per_s=20e9, dram_bytes_per_s=1.0)
    found = samples_in_words(config_with(4, 200, True), machine, 1000, 10 * 10**9)
    assert found == "samples   4 of up to 64 tokens, 6 times: about 32 s each, 6.0% of the run"


def test_without_evaluation_rows_the_model_writes_before_and_after_only() -> None:
    config = config_with(4, 200, False)
    assert [step for step in range(1001) if writes_after(step, 1000, config)] == [0, 1000]
    assert samples_in_words(config, plan_with(), 1000, 1) == (
        "samples   4 of up to 64 tokens, 2 times (before and after: data.eval is null)"
    )
    assert samples_in_words(config_with(0, 200, False), plan_with(), 9, 1) == (
        "samples   none: eval.samples is 0"
    )
