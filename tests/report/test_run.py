"""A run folder is read as far as it goes; a folder without metrics is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatrain.errors import RunFolderError
from megatrain.report.page import render
from megatrain.report.run import Run, read_run
from tests.report.fake_runs import jsonl, write_run
from tests.report.reading import read

FILES = ("config.yaml", "machine.json", "plan.json", "data_card.json", "samples.jsonl")


def metrics(folder: Path, text: str) -> Run:
    (folder / "metrics.jsonl").write_text(text)
    return read_run(folder, "run")


def steps(*numbers: int, loss: float = 1.0) -> str:
    return jsonl([{"step": number, "loss": loss} for number in numbers])


def test_a_torn_last_line_is_no_fault_but_one_in_the_middle_is_counted(tmp_path: Path) -> None:
    run = metrics(tmp_path, steps(1, 2) + '{"step": 3, "lo')
    assert run.curve("loss") == [(1, 1.0), (2, 1.0)]
    assert run.notes == []
    run = metrics(tmp_path, steps(1) + '{"step": 2, "lo\n' + steps(3))
    assert run.curve("loss") == [(1, 1.0), (3, 1.0)]
    assert run.notes == ["metrics.jsonl: could not read 1 lines"]


def test_after_a_resume_the_later_life_counts(tmp_path: Path) -> None:
    evals = [{"step": 2, "eval_loss": 5.0}, {"step": 4, "eval_loss": 6.0}]
    text = steps(1, 2) + jsonl(evals[:1]) + steps(3, 4) + jsonl(evals[1:]) + steps(3, loss=7.0)
    run = metrics(tmp_path, text)
    assert run.curve("loss") == [(1, 1.0), (2, 1.0), (3, 7.0)]
    assert run.curve("eval_loss") == [(2, 5.0)]


def test_numbers_that_a_chart_cannot_add_are_infinite(tmp_path: Path) -> None:
    text = '{"step": 1, "loss": NaN, "a": Infinity, "b": 1e300, "c": %s, "d": true, "e": "x"}\n'
    values = metrics(tmp_path, text % ("9" * 400)).steps[0].values
    assert math.isnan(values["loss"])
    assert [values[key] for key in "abc"] == [math.inf] * 3
    assert not {"d", "e"} & values.keys()


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, "\udcff\udcfe", "{}", "1"])
def test_what_is_damaged_is_left_out(tmp_path: Path, text: str) -> None:
    for name in (*FILES, "metrics.jsonl"):
        (tmp_path / name).write_text(f"{text}\n", errors="surrogateescape")
    read(render([read_run(tmp_path, "run")]))


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_left_out(tmp_path: Path, name: str) -> None:
    run = read_run(write_run(tmp_path, num_steps=30, without=frozenset({name})), "run")
    assert run.notes == []
    read(render([run]))


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"has no metrics\.jsonl\. Give a run folder\."):
        read_run(tmp_path, "run")
