"""Laws of cases.py: a day chooses the same cases everywhere, and days together choose all."""

from __future__ import annotations

import os
from typing import Any

import pytest

from testkit.cases import SEED, fix_the_day, in_dtypes, of_the_day
from testkit.families import COVERING, FAMILIES


def chosen(cases: list[Any]) -> list[object]:
    return [case.values for case in cases if not case.marks]


def test_a_day_chooses_so_many_and_leaves_the_rest_for_the_night() -> None:
    cases = of_the_day(range(50), 7)
    assert [case.values for case in cases] == [(number,) for number in range(50)]
    assert len(chosen(cases)) == 7
    marks = [mark.name for case in cases for mark in case.marks]
    assert marks == ["nightly"] * 43
    assert chosen(cases) == chosen(of_the_day(range(50), 7))


def test_days_differ_and_choose_every_case_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    met = set()
    for day in range(60):
        monkeypatch.setenv(SEED, str(day))
        met |= set(chosen(of_the_day(range(50), 7)))
    assert len(met) == 50


def test_the_day_is_fixed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SEED, "5")
    fix_the_day()
    assert os.environ[SEED] == "5"


def test_every_family_runs_in_bf16_and_each_structure_in_fp32() -> None:
    expected = {(family, "bf16") for family in FAMILIES} | {(family, "fp32") for family in COVERING}
    assert set(chosen(in_dtypes(FAMILIES))) == expected
