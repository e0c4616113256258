"""`train.router_aux_loss`: which coefficient a run has, and where the loss is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from megatrain.cli.demo import byte_tokenizer
from megatrain.cli.verbs import evaluate_model
from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.run.opening.recipe import balancing_note, router_aux_loss
from megatrain.run.trainer import Trainer
from testkit.families import tiny_config
from testkit.runs import write_world


def _config(wanted: Any) -> Config:
    return Config(model="m", data="d.jsonl", train={"router_aux_loss": wanted})


def _mixtral(*, asks: bool) -> Decoder:
    config = tiny_config("mixtral", output_router_logits=asks, router_aux_loss_coef=0.02)
    return build_decoder(config, "bf16")


@pytest.mark.parametrize(
    ("wanted", "asks", "expected"),
    [
        ("auto", True, 0.02),
        ("auto", False, 0.0),
        ("model", False, 0.02),
        (0.5, False, 0.5),
        (0, True, 0.0),
    ],
)
def test_auto_does_what_config_json_asks_for(wanted: Any, asks: bool, expected: float) -> None:
    assert router_aux_loss(_config(wanted), _mixtral(asks=asks)) == expected


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_without_experts_there_is_nothing_to_balance(family: str) -> None:
    decoder = build_decoder(tiny_config(family), "bf16")
    for wanted in ("auto", "model", 0):
        assert router_aux_loss(_config(wanted), decoder) == 0.0
        assert balancing_note(_config(wanted), decoder) is None
    with pytest.raises(
        ConfigError, match=rf"train\.router_aux_loss is 0\.1: transformers' code of {family} has no"
    ):
        router_aux_loss(_config(0.1), decoder)


def test_a_balance_of_another_form_is_not_dropped_in_silence() -> None:
    decoder = build_decoder(tiny_config("doge", is_moe=True, output_router_logits=True), "bf16")
    for wanted in ("auto", "model"):
        with pytest.raises(
            ConfigError, match="the load-balancing loss of doge has an unusual form"
        ):
            router_aux_loss(_config(wanted), decoder)
    assert router_aux_loss(_config(0), decoder) == 0.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, and a model whose config.json asks for router logits."""
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "experts")
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.02, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "experts")
    return folder


def _config_of(world: Path, folder: Path, **changes: dict[str, Any]) -> Config:
    return Config(
        model=str(world / "experts"),
        data={"train": str(world / "rows.jsonl"), "eval": 0.1, "max_length": 64},
        train={"steps": 3, "batch_tokens": 192, "micro_batch_tokens": 64}
        | changes.get("train", {}),
        memory={"device": "cpu"},
        eval=changes["eval"],
        save={"dir": str(folder)},
    )


def _run(world: Path, folder: Path, **train: Any) -> list[dict[str, Any]]:
    """Return the metrics of a run of three steps, with an evaluation at the end."""
    trainer = Trainer(_config_of(world, folder, train=train, eval={"samples": 0}))
    try:
        trainer.train()
        trainer.save_model(folder / "model")
    finally:
        trainer.close()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_reports_the_loss_in_training_and_evaluation(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = _run(world, tmp_path / "run")
    steps = [line for line in metrics if "loss" in line]
    evaluations = [line for line in metrics if "eval_loss" in line]
    assert len(steps) == 3
    assert all(1.9 < line["aux_loss"] < 4.0 for line in steps)
    assert all(1.9 < line["eval_aux_loss"] < 4.0 for line in evaluations)
    said = capsys.readouterr().err
    notes = json.loads((tmp_path / "run" / "plan.json").read_text())["notes"]
    assert "experts are balanced: loss + 0.02 x aux_loss is minimized" in "\n".join(notes)
    assert f"aux {steps[-1]['aux_loss']:.4f}" in said
    assert f"balancing loss {evaluations[-1]['eval_aux_loss']:.4f}" in said
    exported = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert exported["output_router_logits"] is True
    told = evaluate_model(tmp_path / "run", world / "rows.jsonl", 8)
    assert ", balancing loss " in told


def test_a_run_without_it_reports_none_and_trains_otherwise(world: Path, tmp_path: Path) -> None:
    with_it = _run(world, tmp_path / "with", router_aux_loss=1.0)
    without = _run(world, tmp_path / "without", router_aux_loss=0)
    assert not any("aux_loss" in key for line in without for key in line)
    losses = [[line["loss"] for line in run if "loss" in line] for run in (with_it, without)]
    assert losses[0][0] == losses[1][0]
    assert losses[0][-1] != losses[1][-1]
