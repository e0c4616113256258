"""Laws of the loop, on the demo's tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.cli.demo import write_demo
from megatrain.config import Config, load_config
from megatrain.disk.hf.model import load_model
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError, HubError, ModelFolderError
from megatrain.memory.kinds import TensorKind
from megatrain.optim.adamw import AdamW
from megatrain.optim.learning_rate import LRSchedule
from megatrain.run.opening.training_data import TrainingData, open_data
from megatrain.run.trainer import Trainer
from megatrain.step.settings import StepSettings

STEPS = 4
OVERRIDES = ["train.batch_tokens=512", "train.micro_batch_tokens=256", "eval.samples=2"]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    return load_config(write_demo(tmp_path / "demo", num_steps=STEPS), OVERRIDES)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained_by_hand(config: Config) -> dict[str, torch.Tensor]:
    """The engine given the run's batches, without the loop."""
    home = load_model(config.model.name_or_path, dtype=config.model.dtype)
    peak = config.optim.learning_rate
    assert peak != "auto"
    rate = LRSchedule(peak=peak, shape="cosine", num_steps=STEPS, warmup=0.05)
    optimizer = AdamW(learning_rate=rate.rate, max_grad_norm=1.0)
    with Trainer(config.model_copy(update={"save": _elsewhere(config)})) as other:
        config = other.config
        data = open_data(config, other.tokenizer, other.plan.settings, other.data.rows, flat=True)
    assert isinstance(data, TrainingData)
    settings = StepSettings(seed=config.train.seed)
    with Engine(home.decoder, home.store, optimizer=optimizer, settings=settings) as engine:
        for _ in range(STEPS):
            engine.step(data.next_batch())
    data.close()
    return {p.name: home.store.param(p.name, TensorKind.HI).clone() for p in home.decoder.params}


def _elsewhere(config: Config) -> Any:
    return config.save.model_copy(update={"dir": f"{config.run_dir}-other"})


@pytest.mark.merge
def test_a_run_does_what_the_engine_does_and_explains_itself(config: Config) -> None:
    expected = trained_by_hand(config)
    with Trainer(config) as trainer:
        outcome = trainer.train()
        for name, weight in expected.items():
            assert torch.equal(trainer.home.store.param(name, TensorKind.HI), weight), name
        trainer.save_model(trainer.folder.path / "model")
    folder = trainer.folder.path
    metrics = lines(folder / "metrics.jsonl")
    steps = [line for line in metrics if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert (steps[0]["loss"], steps[-1]["loss"]) == (outcome.first_loss, outcome.last_loss)
    assert steps[-1]["total_tokens"] == outcome.total_tokens
    assert [line["step"] for line in metrics if "eval_loss" in line] == [0, 2, 4]
    for line in steps:
        assert sum(line["split"].values()) == pytest.approx(line["seconds"], rel=0.01, abs=1e-3)
        assert line["tokens_per_s"] == pytest.approx(line["num_tokens"] / line["seconds"], rel=1e-3)
    samples = lines(folder / "samples.jsonl")
    assert [line["step"] for line in samples] == [0, 0, 2, 2, 4, 4]
    rows = (Path(config.data.train[0].path)).read_text()
    assert all(line["expected"].split("<")[0] in rows for line in samples)
    assert load_config(folder / "config.yaml", []) == config.decided(packing=True)
    for name in ("machine.json", "plan.json", "data_card.json", "trace.json"):
        assert json.loads((folder / name).read_text())


def test_the_exported_model_gives_the_evaluations_loss(config: Config) -> None:
    with Trainer(config) as trainer:
        outcome = trainer.train()
        trainer.save_model(trainer.folder.path / "model")
        assert isinstance(trainer.data, TrainingData)
        batches = list(trainer.data.eval_batches())
    model = AutoModelForCausalLM.from_pretrained(
        trainer.folder.path / "model", dtype=torch.float32
    ).eval()
    total, count = 0.0, 0
    for micro in (micro for batch in batches for micro in batch):
        with torch.no_grad():
            logits = model(**micro.inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        targets = micro.labels[:, 1:].flatten()
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        total, count = total + float(losses), count + int((targets != -100).sum())
    assert outcome.eval_loss == pytest.approx(total / count, rel=1e-5)


def test_a_run_that_dies_has_written_every_step_before(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def fail_at_three(engine: Engine, batch: Any, says: Any) -> Any:
        if engine._num_steps == 2:
            raise ZeroDivisionError
        return step(engine, batch, says)

    monkeypatch.setattr(Engine, "step", fail_at_three)
    with pytest.raises(ZeroDivisionError), Trainer(config) as trainer:
        trainer.train()
    found = [
        line["step"] for line in lines(Path(config.run_dir) / "metrics.jsonl") if "loss" in line
    ]
    assert found == [1, 2]


def test_a_model_that_is_not_there_is_said(config: Config) -> None:
    for name, error, text in (
        (
            "some/model",
            HubError,
            r"^some/model is not a folder here .*`hf download some/model`",
        ),
        ("./model", ModelFolderError, r"^\./model: no such folder"),
    ):
        missing = config.model.model_copy(update={"name_or_path": name})
        with pytest.raises(error, match=text):
            Trainer(config.model_copy(update={"model": missing}))


def test_evaluate_returns_the_metrics_that_the_run_logs(config: Config) -> None:
    with Trainer(config) as trainer:
        metrics = trainer.evaluate()
        trainer.train()
    first = lines(trainer.folder.path / "metrics.jsonl")[0]
    assert first == {"step": 0, **metrics}
    assert metrics.keys() == {"eval_loss", "eval_perplexity"}


def test_evaluate_without_rows_says_what_to_give(config: Config) -> None:
    without = config.model_copy(update={"data": config.data.model_copy(update={"eval": None})})
    with Trainer(without) as trainer, pytest.raises(ConfigError, match=r"Give eval_dataset, or da"):
        trainer.evaluate()
