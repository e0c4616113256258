"""The ratios and tables of benchmarks/rivals: the best rival counts, one that failed does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.rivals import contestants
from benchmarks.rivals.compared import (
    LEAN,
    RACES,
    Entry,
    bytes_over_best,
    code_lines,
    held_by,
    median_interval,
    step_over_best,
    turns_of,
)
from benchmarks.rivals.contestants import HOMES, WORKERS
from benchmarks.rivals.environments import ENVIRONMENTS
from benchmarks.rivals.page import draw, tables


def held(label: str, figure: float | None, states: str, *, is_ours: bool = False) -> dict[str, Any]:
    row: dict[str, Any] = {"label": label, "states": states, "is_ours": is_ours}
    row |= {"worker": "benchmarks/rivals/workers/plain.py", "dtype": "float32", "settings": {}}
    return row if figure is None else row | {"bytes_per_param": figure}


ROWS = [
    held("plain", 17.0, "fp32"),
    held("lean", 10.0, "8bit"),
    held("broken", None, "8bit"),
    held("ours", 15.3, "fp32", is_ours=True),
    held("ours, lean", 8.0, "8bit", is_ours=True),
]


def test_ours_at_its_leanest_is_compared_with_the_leanest_rival() -> None:
    found = bytes_over_best(ROWS)
    assert (found["bytes_over_best"], found["bytes_over_best_rival"]) == (0.8, "lean")
    assert found["bytes_over_best_fp32_states"] == 0.9
    assert found["bytes_over_best_fp32_states_rival"] == "plain"


def test_a_leaner_rival_would_be_noticed() -> None:
    found = bytes_over_best([*ROWS, held("leaner", 4.0, "4bit")])
    assert (found["bytes_over_best"], found["bytes_over_best_rival"]) == (2.0, "leaner")


def test_the_table_has_every_row_and_says_which_did_not_run() -> None:
    lines = list(tables({"bytes": ROWS}))
    assert sum(any(f"| {row['label']} |" in line for line in lines) for row in ROWS) == len(ROWS)
    assert "did not run" in next(line for line in lines if "broken" in line)


def raced(label: str, over: float, *, is_ours: bool = False) -> dict[str, Any]:
    row = held(label, None, "fp32", is_ours=is_ours)
    row |= {"over": over, "over_interval": [over - 0.1, over + 0.1], "processor_over": over}
    return row | {"rival_first_step_s": 9.0}


def test_the_rival_that_comes_nearest_counts_in_its_best_settings() -> None:
    rows = [raced("plain", 0.8), raced("plain, compiled", 0.95), raced("ours", 1.4, is_ours=True)]
    found = step_over_best([*rows, held("broken", None, "fp32")])
    assert (found["step_over_best"], found["step_over_best_rival"]) == (0.95, "plain, compiled")
    assert step_over_best([held("broken", None, "fp32")]) == {}
    assert "| plain | 1.25 (1.11 to 1.43) | 9 |" in "\n".join(tables({"speed": rows}))


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    drawn = np.random.default_rng(0).exponential(size=(4000, 9))
    intervals = [median_interval(list(row)) for row in drawn]
    held_it = np.mean([low <= np.log(2) <= high for low, high in intervals])
    assert 0.94 < held_it < 0.98  # by the binomial 0.961; the next narrower pair has 0.82
    assert median_interval([3.0, 1.0, 2.0]) == [1.0, 3.0]


def fits(label: str, limit: float, params: int | None) -> dict[str, Any]:
    return held(label, None, "8bit") | {"limit_gib": limit, "params": params}


LARGEST = [fits("small", 2, None), fits("small", 4, 90_000_000), fits("large", 2, 200_000_000)]


def test_the_table_of_the_largest_has_a_column_for_each_limit() -> None:
    lines = list(tables({"largest": LARGEST}))
    assert "| largest model under | 2 GiB | 4 GiB |" in "\n".join(lines)
    assert any(line.startswith("| small | none | 90M | 8bit |") for line in lines)
    assert any(line.startswith("| large | 200M |  | 8bit |") for line in lines)


def test_the_picture_has_what_was_measured(tmp_path: Path) -> None:
    speed = [raced("plain", 0.8), raced("ours, lean", 1.4, is_ours=True)]
    draw({"speed": speed, "bytes": ROWS, "largest": LARGEST}, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 10_000
    draw({"speed": speed, "bytes": ROWS}, tmp_path / "of a card.png")
    assert (tmp_path / "of a card.png").stat().st_size > 10_000


def test_every_entry_has_a_worker_and_an_environment() -> None:
    for entry in (*(entry for pair in RACES for entry in pair), *LEAN):
        assert (WORKERS / f"{entry.worker}.py").exists()
        assert code_lines(entry.worker) > 10
        if not entry.is_ours:
            assert (entry.home or HOMES[entry.worker]) in ENVIRONMENTS


def test_a_rival_that_does_not_start_is_a_row_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contestants, "WORKERS", tmp_path)
    entry, shared = Entry(worker="ours", label="none"), {"model": "", "tokens": ""}
    assert "ours ended with 2" in held_by(entry, shared, tmp_path)["failed"]
    assert "ours ended with 2" in turns_of(entry, entry, shared, tmp_path, 1)["failed"]
