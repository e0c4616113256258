"""Tiers of tests: every push, every merge, and the night.

A test without a mark runs at every push. The mark `merge` is for a test that takes over 3 s, or for
a case of a law that a push can do without; the mark `night` is for the many other cases. Of a test
with the mark `few(2)` two cases run at a push and the others at a merge. Nothing of a push or a
merge is drawn by date. The night has more cases than a night has hours, so
`pytest -m night --share 7` plays a seventh of them, which the date chooses: a week plays all.

A test id names its case, so a failure needs no seed to be repeated: `pytest -m "" TEST_ID`. To
choose as another day did, set MEGATRAIN_DAY to the number that pytest printed below the failure.
"""

from __future__ import annotations

import datetime
import os
import random
import zlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

from testkit.families import COVERING, RARE

DAY = "MEGATRAIN_DAY"


def fix_the_day() -> None:
    """Choose the day once, before any worker starts: two of them may see different dates."""
    today = datetime.datetime.now(datetime.UTC).date()
    os.environ.setdefault(DAY, str(today.toordinal()))


def is_drawn(test_id: str, share: int) -> bool:
    """Return whether this day plays a test of the night, of which each day plays 1/`share`."""
    return zlib.crc32(test_id.encode()) % share == int(os.environ[DAY]) % share


def mark_all_but_few(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of tests with the mark `few` that a push does without."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not {"night", "long", "gpu"} & set(item.keywords):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for those in cases.values():
        marker = those[0].get_closest_marker("few")
        assert marker is not None
        chosen = spread(len(those), marker.args[0])
        for number, item in enumerate(those):
            if number not in chosen:
                item.add_marker(pytest.mark.merge)


def spread(total: int, count: int) -> set[int]:
    """Return `count` numbers below `total`, as far apart as they can be."""
    count = min(count, total)
    return {number * total // count for number in range(count)}


def at_a_push(cases: Sequence[Any], count: int, *, others: str = "night") -> list[Any]:
    """Return every case as a parameter; all but `count` fixed ones have the mark `others`."""
    chosen = set(random.Random(0).sample(range(len(cases)), count))
    return [
        pytest.param(case, marks=() if number in chosen else getattr(pytest.mark, others))
        for number, case in enumerate(cases)
    ]


def by_family(families: Iterable[str], *, others: str = "merge") -> list[Any]:
    """Return each family as a parameter with the mark of its tier: COVERING none, RARE `night`."""

    def marks(family: str) -> Any:
        if family in COVERING:
            return ()
        return pytest.mark.night if family in RARE else getattr(pytest.mark, others)

    return [pytest.param(family, marks=marks(family)) for family in families]


def in_dtypes(families: Collection[str]) -> list[Any]:
    """Return each family in bf16 and fp32: COVERING at a push, bf16 of others at a merge."""
    return [
        pytest.param(*case.values, dtype, marks=case.marks)
        for dtype, others in (("bf16", "merge"), ("fp32", "night"))
        for case in by_family(families, others=others)
    ]
