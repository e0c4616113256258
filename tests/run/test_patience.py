"""Laws of patience.py, and of a run that stops early."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from megatrain.cli.demo import write_demo
from megatrain.config import load_config
from megatrain.errors import ConfigError
from megatrain.run.state import Patience
from megatrain.run.trainer import Trainer
from testkit.runs import judge_by

NAN = float("nan")


def stopped_at(losses: list[float], limit: int | None) -> int | None:
    patience = Patience()
    for step, loss in enumerate(losses):
        patience.is_best(step + 1, loss)
        if patience.is_over(limit):
            return step
    return None


@pytest.mark.parametrize(
    ("losses", "limit", "step"),
    [
        ([3.0, 2.0, 2.5, 2.4, 1.0], 2, 3),
        ([3.0, 2.0, 2.5, 1.9, 2.0, 2.0], 2, 5),
        ([3.0, 3.0], 1, 1),
        ([3.0, NAN, NAN], 2, 2),
        ([NAN, 3.0, 2.0, 1.0], 2, None),
        ([NAN, NAN], 2, 1),
        ([3.0, 2.0, 1.0], 1, None),
        ([3.0, 4.0, 5.0], None, None),
    ],
)
def test_stops_after_so_many_without_a_better_one(
    losses: list[float], limit: int | None, step: int | None
) -> None:
    assert stopped_at(losses, limit) == step


def test_the_evaluation_before_training_is_not_counted() -> None:
    """The best model of a run is one that was trained, even if it is worse than the given one."""
    patience = Patience()
    assert not patience.is_best(0, 1.0)
    assert patience.is_best(10, 3.0)
    assert not patience.is_best(20, 3.5)
    assert (patience.best_step, patience.num_evaluations, patience.num_worse) == (10, 2, 1)
    assert patience.place(10, 3.0) == (
        "model of step 10, the best of 2 evaluations (before training the loss was lower: 1.0000)"
    )


def test_a_run_stops_early_says_so_and_records_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    path = write_demo(tmp_path / "demo", num_steps=8)
    settings = ["train.batch_tokens=512", "train.micro_batch_tokens=256", "eval.samples=0"]
    judge_by(monkeypatch, [5.0, 4.0, 4.5, 4.25])
    config = load_config(path, [*settings, "eval.every=1", "eval.patience=2"])
    with Trainer(config) as trainer:
        outcome = trainer.train()
    assert outcome.num_steps == 3
    assert outcome.eval_loss == 4.25
    text = "stopping early: 2 evaluations without a loss below 4.0000 of step 1 (eval.patience)"
    assert text in capsys.readouterr().err
    lines = (trainer.folder.path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert records[-1] == {
        "step": 3, "eval_loss": 4.25, "eval_perplexity": pytest.approx(70.1, rel=1e-3),
        "stopped_early": True, "best_step": 1, "best_loss": 4.0,
    }  # fmt: skip
    assert all(first["step"] <= second["step"] for first, second in pairwise(records))


def test_patience_needs_something_to_judge_by(tmp_path: Path) -> None:
    path = write_demo(tmp_path / "demo", num_steps=8)
    with pytest.raises(ConfigError, match=r"eval\.patience is 2 and data\.eval is null"):
        load_config(path, ["eval.patience=2", "data.eval=null"])
