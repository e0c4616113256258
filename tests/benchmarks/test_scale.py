"""The tables of benchmarks.scale that no page prints can still be printed."""

from __future__ import annotations

import pytest

from benchmarks.scale import TABLES

SIMULATED = ("patience", "eight", "workstations")


@pytest.mark.parametrize(
    "name",
    [
        *("limits", "failures", "data"),
        *(pytest.param(name, marks=pytest.mark.merge) for name in SIMULATED),
    ],
)
def test_a_table_has_rows_and_fits_a_terminal(name: str) -> None:
    lines = list(TABLES[name]())
    assert len(lines) > 5
    assert max(map(len, lines)) <= 80
