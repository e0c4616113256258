"""The arguments of a trainer: what is given is used, or refused with what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.losses.loss import NEXT_TOKEN, NextToken
from megatrain.run.arguments import Given, read_arguments

ROWS = [{"text": "words"}]
STREAM = {"train_dataset": iter(ROWS)}


@dataclass
class SomeArguments:
    """As transformers' TrainingArguments: a dataclass whose fields have defaults."""

    learning_rate: float = 5e-5
    num_train_epochs: float = 3.0
    local_rank: int = -1


def _read(**changes: Any) -> tuple[Config, Given]:
    given: dict[str, Any] = {"config": None, "model": "folder", "train_dataset": ROWS}
    given |= {"eval_dataset": None, "callbacks": (), "loss": None, "compute_metrics": None}
    given |= {name: changes.pop(name) for name in list(changes) if name in given}
    return read_arguments(given.pop("config"), **given, sections=changes)


def test_rows_have_a_path_that_no_file_can_have() -> None:
    config, given = _read(eval_dataset=ROWS, data={"max_length": 64}, train={"steps": 3})
    assert [source.path for source in config.data.train] == ["<train_dataset>"]
    assert given.rows.keys() == {"<train_dataset>", "<eval_dataset>"}
    assert (config.data.max_length, config.train.steps) == (64, 3)
    assert Config(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "needs a model"),
        ({"model": type("M", (nn.Module,), {"save_pretrained": 0})()}, "M in memory"),
        ({"train_dataset": None}, "nothing to train on"),
        ({"data": {"train": "x.jsonl"}}, "train_dataset and data.train are both given"),
        ({"eval_dataset": ROWS, "data": {"eval": 0.1}}, "eval_dataset and data.eval are both"),
        ({"config": Config(model="m", data="x.jsonl")}, "a config and model, train_dataset are"),
        ({"config": "run.yaml"}, "the first argument is a str: give an mt.Config"),
        ({"trane": {}}, "unknown key trane. Did you mean train"),
        (
            {"args": {"learning_rate": 2e-5, "num_train_epochs": 2}},
            "learning_rate is optim.learning_rate, num_train_epochs is train.epochs",
        ),
        (
            {"args": SomeArguments(learning_rate=2e-5)},
            "Of those given, learning_rate is optim.learning_rate. docs/migration.md",
        ),
        ({"args": 3}, "takes the sections of a config instead"),
        ({"resume_from_checkpoint": True}, r"trainer\.train\(resume_from_checkpoint=True\)"),
        ({"loss": NextToken}, "give an instance of a subclass of mt.Loss"),
        (
            {"config": Config(model="m", data="x", loss={"name": "dpo"}), "model": None}
            | {"train_dataset": None, "loss": NEXT_TOKEN},
            "loss is NextToken and loss.name of the config is dpo",
        ),
        ({"compute_metrics": len}, "nothing to evaluate on"),
        ({**STREAM, "train": {"steps": 3}}, "nobody knows how much of it 3 steps need"),
        ({"eval_dataset": iter(ROWS)}, "Set eval.max_rows"),
    ],
)
def test_what_cannot_be_used_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _read(**changes)


def test_a_stream_with_a_bound_is_welcome() -> None:
    _read(**STREAM, train={"steps": 3, "batch_rows": 8})
    _read(**STREAM, train={"epochs": 1})
