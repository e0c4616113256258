"""Which cases of a large law CI plays: those that the day chooses. All of them run nightly.

A case that is not chosen carries the mark `nightly`, which pytest leaves out by default. The id of
a test names its case, so a failure needs no seed to be repeated: `pytest -m "" TEST_ID`. To choose
as another day did, set MEGATRAIN_CASES_SEED to the number that CI printed below the failure.
"""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest

from testkit.families import COVERING

SEED = "MEGATRAIN_CASES_SEED"


def fix_the_day() -> None:
    """Choose the seed once, before any worker starts: two of them may see different days."""
    today = datetime.datetime.now(datetime.UTC).date()
    os.environ.setdefault(SEED, str(today.toordinal()))


def of_the_day(cases: Sequence[Any], count: int) -> list[Any]:
    """Return every case as a parameter; all but `count` of them are for the night."""
    chosen = set(random.Random(int(os.environ[SEED])).sample(range(len(cases)), count))
    return [
        pytest.param(case, marks=() if number in chosen else pytest.mark.nightly)
        for number, case in enumerate(cases)
    ]


def in_dtypes(families: Sequence[str]) -> list[Any]:
    """Return each family in bf16 and in fp32, of which most are for the night."""
    cases = [pytest.param(family, "bf16") for family in families]
    for family in families:
        marks = () if family in COVERING else pytest.mark.nightly
        cases.append(pytest.param(family, "fp32", marks=marks))
    return cases
