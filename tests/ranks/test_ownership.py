"""Every element of a segment belongs to exactly one rank."""

from __future__ import annotations

from itertools import chain

import pytest

from megatrain.ranks.ownership import Owner

SIZES = (1, 2, 3, 4, 8)
SEGMENTS = (1, 255, 256, 257, 1024, 10_000, 65_536 + 256)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_elements", SEGMENTS)
def test_parts_are_the_segment_each_element_once_in_order(size: int, num_elements: int) -> None:
    parts = Owner(0, size).parts(num_elements, 256)
    assert list(chain.from_iterable(parts)) == list(range(num_elements))
    assert [Owner(rank, size).owned(num_elements, 256) for rank in range(size)] == parts


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_elements", SEGMENTS)
def test_parts_are_equal_but_for_the_last_that_has_any(size: int, num_elements: int) -> None:
    owner = Owner(0, size)
    part = owner.part(num_elements, 256)
    lengths = [len(owned) for owned in owner.parts(num_elements, 256) if owned]
    assert all(length == part for length in lengths[:-1])
    assert 0 < lengths[-1] <= part
    assert part % 256 == 0
