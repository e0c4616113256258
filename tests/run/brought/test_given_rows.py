"""Runs on rows that a program gives: the bits of the same run on a file, and a checked resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor

from megatrain.errors import DataError, Interrupted
from megatrain.losses.loss import LossInputs, LossValue
from megatrain.losses.next_token import NextToken
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, State, StopAfter, config_of, run, state_of, unequal

pytestmark = pytest.mark.usefixtures("cache_in_world")
SETTING = Setting(save_every=None, eval_every=None)
SHORT = {"train": {"steps": 3}, "eval": {"samples": 0}}


def _rows(world: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (world / "rows.jsonl").read_text().splitlines()]


def _arguments(world: Path, path: Path, rows: Any, **changes: Any) -> dict[str, Any]:
    config = config_of(world, path, SETTING, **SHORT | changes)
    sections = {name: dict(section) for name, section in config}
    del sections["data"]["train"], sections["loss"]
    return {**sections, "train_dataset": rows}


def _ended(**arguments: Any) -> State:
    with Trainer(**arguments) as trainer:
        trainer.train()
        return state_of(trainer)


def test_rows_train_as_the_file_does(world: Path, tmp_path: Path) -> None:
    expected = run(config_of(world, tmp_path / "file", SETTING, **SHORT))
    rows = datasets.Dataset.from_list(_rows(world))
    assert unequal(expected, _ended(**_arguments(world, tmp_path / "rows", rows))) == []
    card = json.loads((tmp_path / "rows/data_card.json").read_text())
    assert (card["source"], card["rows"]) == ("train_dataset", 60)
    fewer = _ended(**_arguments(world, tmp_path / "fewer", rows.select(range(59))))
    assert unequal(expected, fewer) != []


class _Stream:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def test_a_stream_is_resumed_exactly_and_another_one_is_refused(
    world: Path, tmp_path: Path
) -> None:
    rows = _rows(world) * 8
    expected = _ended(**_arguments(world, tmp_path / "whole", _Stream(rows)))
    arguments = _arguments(world, tmp_path / "parts", _Stream(rows))
    interrupts = StopAfter(2)
    with Trainer(**arguments, interrupts=interrupts) as trainer:
        interrupts.trainer = trainer
        with pytest.raises(Interrupted, match="stopped after step 2"):
            trainer.train()
    assert trainer.data.card["rows"] == 256
    with pytest.raises(DataError, match="the rows differ from those of the run"):
        Trainer(**arguments | {"train_dataset": iter(rows[1:])}, resume=True)
    again = _ended(**arguments | {"train_dataset": iter(rows)}, resume=True)
    assert unequal(expected, again) == []


class _Doubled(NextToken):
    """Twice the loss: through the log-probabilities, as an own loss is written."""

    needs_logprobs = True
    weights = NextToken.__mro__[1].weights  # type: ignore[attr-defined]

    def value(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        return LossValue(total=-2.0 * logprobs.sum(), figures={"half": -logprobs.sum()})


def test_an_own_loss_is_trained_on(world: Path, tmp_path: Path) -> None:
    def first(path: Path, **arguments: Any) -> dict[str, Any]:
        _ended(**_arguments(world, path, _rows(world)), **arguments)
        return dict(json.loads((path / "metrics.jsonl").read_text().splitlines()[1]))

    plain, doubled = first(tmp_path / "plain"), first(tmp_path / "own", loss=_Doubled())
    assert plain["step"] == doubled["step"] == 1
    torch.testing.assert_close(doubled["loss"], 2 * plain["loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(doubled["grad_norm"], 2 * plain["grad_norm"], rtol=1e-2, atol=0)
