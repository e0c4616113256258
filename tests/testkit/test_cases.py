"""Laws of cases.py: a push and a merge are fixed, and the nights of a week play every case."""

from __future__ import annotations

import os
from typing import Any

import pytest

from testkit.cases import DAY, at_a_push, by_family, fix_the_day, in_dtypes, is_drawn, spread
from testkit.families import COVERING, FAMILIES


def of_tier(cases: list[Any], *marks: str) -> list[Any]:
    return [case.values for case in cases if [mark.name for mark in case.marks] == list(marks)]


def test_a_push_plays_the_same_cases_each_day(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = at_a_push(range(50), 7)
    assert [case.values for case in cases] == [(number,) for number in range(50)]
    assert (len(of_tier(cases)), len(of_tier(cases, "night"))) == (7, 43)
    monkeypatch.setenv(DAY, "1")
    assert of_tier(at_a_push(range(50), 7)) == of_tier(cases)


def test_each_night_draws_a_share_and_a_week_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [f"tests/a.py::test_b[{number}]" for number in range(700)]
    nights = []
    for day in range(739_937, 739_944):
        monkeypatch.setenv(DAY, str(day))
        nights.append({each for each in ids if is_drawn(each, 7)})
    assert sorted(each for night in nights for each in night) == sorted(ids)
    assert all(50 < len(night) < 150 for night in nights)


def test_the_day_is_fixed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DAY, "5")
    fix_the_day()
    assert os.environ[DAY] == "5"


def test_each_structure_runs_at_a_push_and_every_family_at_a_merge() -> None:
    assert of_tier(by_family(FAMILIES)) == [(f,) for f in FAMILIES if f in COVERING]
    assert len(of_tier(by_family(FAMILIES), "merge")) == len(FAMILIES) - len(COVERING)
    cases = in_dtypes(FAMILIES)
    assert {family for family, _ in of_tier(cases)} == set(COVERING)
    assert {dtype for _, dtype in of_tier(cases, "merge")} == {"bf16"}
    assert {dtype for _, dtype in of_tier(cases, "night")} == {"fp32"}
    assert len(cases) == 2 * len(FAMILIES)


@pytest.mark.few(2)
@pytest.mark.parametrize("number", range(5))
def test_of_few_cases_two_run_at_a_push(number: int, request: pytest.FixtureRequest) -> None:
    assert ("merge" in request.node.keywords) == (number not in (0, 2))


def test_few_cases_are_far_apart() -> None:
    assert spread(10, 3) == {0, 3, 6}
    assert spread(2, 5) == {0, 1}
