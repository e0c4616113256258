"""Runs on rows that a program gives: the bits of the same run on a file, and a checked resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor

from megatrain.cli.demo import byte_tokenizer
from megatrain.data.rows.in_memory import GivenRows
from megatrain.data.tokens import prepare as preparing
from megatrain.data.tokens.encoding import ChunkEncoder
from megatrain.data.tokens.prepare import prepare
from megatrain.errors import DataError, Interrupted
from megatrain.losses.loss import LossInputs, LossValue, NextToken
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


def _ended(*, resume: bool = False, **arguments: Any) -> State:
    with Trainer(**arguments) as trainer:
        trainer.train(resume_from_checkpoint=resume)
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
        Trainer(**arguments | {"train_dataset": iter(rows[1:])})
    again = _ended(**arguments | {"train_dataset": iter(rows)}, resume=True)
    assert unequal(expected, again) == []


class _Doubled(NextToken):
    """Twice the loss: through the log-probabilities, as an own loss is written."""

    needs_logprobs = True
    logprob_grads = NextToken.__mro__[1].logprob_grads  # type: ignore[attr-defined]

    def compute_loss(self, inputs: LossInputs, logprobs: Tensor) -> LossValue:
        return LossValue(loss_sum=-2.0 * logprobs.sum(), metrics={"half": -logprobs.sum()})


def test_an_own_loss_is_trained_on(world: Path, tmp_path: Path) -> None:
    def first(path: Path, **arguments: Any) -> dict[str, Any]:
        _ended(**_arguments(world, path, _rows(world)), **arguments)
        return dict(json.loads((path / "metrics.jsonl").read_text().splitlines()[1]))

    plain, doubled = first(tmp_path / "plain"), first(tmp_path / "own", loss=_Doubled())
    assert plain["step"] == doubled["step"] == 1
    torch.testing.assert_close(doubled["loss"], 2 * plain["loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(doubled["grad_norm"], 2 * plain["grad_norm"], rtol=1e-2, atol=0)


def _prepared_bytes(rows: list[Any], folder: Path, num_workers: int) -> dict[str, bytes]:
    """Return the files that are made of rows."""
    given = GivenRows("train_dataset", rows)
    made = prepare(
        given, byte_tokenizer(), cache_dir=folder, max_length=64, num_workers=num_workers
    )
    return {path.name: path.read_bytes() for path in made.folder.iterdir()}


def _fail(*_: Any) -> Any:
    raise ZeroDivisionError


def test_many_rows_are_prepared_by_all_cores_to_the_same_bytes(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = _rows(world) * 10
    expected = _prepared_bytes(rows, tmp_path / "few", num_workers=2)
    monkeypatch.setattr(preparing, "_MANY_ROWS", len(rows))
    monkeypatch.setattr(ChunkEncoder, "encode", _fail)  # in this process
    assert _prepared_bytes(rows, tmp_path / "many", num_workers=2) == expected
    with pytest.raises(ZeroDivisionError):
        _prepared_bytes(rows[1:], tmp_path / "fewer", num_workers=2)


class _Text(str):
    """A value that a process without this module could not read."""

    __slots__ = ()


def test_rows_with_objects_of_the_program_are_prepared_by_it(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"some words {number}"} for number in range(600)]
    own = [
        row if number != 300 else {"text": _Text(row["text"])} for number, row in enumerate(rows)
    ]
    expected = _prepared_bytes(rows, tmp_path / "few", num_workers=1)
    monkeypatch.setattr(preparing, "_MANY_ROWS", len(rows))
    counted: list[int] = []
    encode = ChunkEncoder.encode

    def counting(self: ChunkEncoder, chunk: Any) -> Any:
        counted.append(len(chunk))
        return encode(self, chunk)

    monkeypatch.setattr(ChunkEncoder, "encode", counting)
    assert _prepared_bytes(own, tmp_path / "own", num_workers=2) == expected
    assert counted == [256], "the chunk with the object, and no other"
    counted.clear()
    assert _prepared_bytes(rows, tmp_path / "many", num_workers=2) == expected
    assert counted == []


UNGUARDED = """
import json, sys
from pathlib import Path
print("imported")
import megatrain.data.tokens.prepare as preparing
from megatrain.data.rows.in_memory import GivenRows
from testkit.tokenizers_of_kinds import tokenizer_of
preparing._MANY_ROWS = 600
if sys.argv[1] == "shown":
    from contextlib import nullcontext
    preparing.program_hidden = nullcontext
rows = [{"text": f"some words {number}"} for number in range(600)]
made = preparing.prepare(
    GivenRows("train_dataset", rows), tokenizer_of("chatml"), cache_dir=sys.argv[2], max_length=64,
    num_workers=2,
)
print(made.card["rows"])
"""


@pytest.mark.merge
@pytest.mark.parametrize(("program", "said"), [("hidden", ["imported", "600"]), ("shown", None)])
def test_a_script_without_a_guard_is_not_imported_again(
    program: str, said: list[str] | None, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, str(script), program, str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if said is None:  # so the test can fail
        assert done.stdout.count("imported") > 1
        assert done.returncode != 0
    else:
        assert (done.stdout.split(), done.returncode) == (said, 0), done.stderr
