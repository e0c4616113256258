"""Laws of home_sums.py and slot_sums.py: both policies give the same sums."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.engine.gradients.home_sums import HomeSums
from megatrain.engine.gradients.outbox import DirectCopies
from megatrain.engine.gradients.slot_sums import SlotSums
from megatrain.engine.gradients.slots import GradSlots
from megatrain.memory.layout import ALIGN
from tests.engine.gradients.made_parts import (
    BF16,
    FP32,
    LAYOUT,
    NAMES,
    Sums,
    drained,
    empty,
    parts,
    read,
)


def made(kind: str, **changes: Any) -> Sums:
    slots = GradSlots(LAYOUT, changes.pop("users", {0: [0, 1]}), empty, **changes)
    return HomeSums(slots, {}) if kind == "home" else SlotSums(slots, DirectCopies())


@pytest.fixture(params=["home", "slots"])
def sums(request: pytest.FixtureRequest) -> Sums:
    return made(request.param)


def sum_up(sums: Sums, given: list[dict[str, Tensor]]) -> None:
    sums.begin(0)
    for part in given:
        sums.add(0, 0, {name: grad.clone() for name, grad in part.items()})


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_sums_are_in_fp32_in_the_order_of_the_parts(
    sums: Sums, dtype: torch.dtype, count: int
) -> None:
    given = [parts(seed, dtype) for seed in range(count)]
    sum_up(sums, given)
    found = read(sums)
    for name in NAMES:
        total = given[0][name].float()
        for part in given[1:]:
            total = total + part[name].float()
        assert torch.equal(found[name], total)


def test_a_sum_in_bf16_or_in_another_order_would_be_noticed(sums: Sums) -> None:
    given = [parts(seed, FP32) for seed in range(5)]
    sum_up(sums, given)
    wide = read(sums)["0.3"]
    backwards = sum((part["0.3"] for part in reversed(given)), torch.zeros(130))
    narrow = sum((part["0.3"].bfloat16() for part in given), torch.zeros(130, dtype=BF16))
    assert not torch.equal(wide, backwards)
    assert not torch.equal(wide, narrow.float())


@pytest.mark.parametrize("lacking", NAMES)
def test_a_param_without_a_gradient_counts_as_zero_and_shifts_nothing(
    sums: Sums, lacking: str
) -> None:
    sum_up(sums, [parts(1)])  # something to be forgotten
    given = parts(3)
    sums.begin(0)
    sums.add(0, 0, {name: grad for name, grad in given.items() if name != lacking})
    sums.add(0, 0, {})
    found = read(sums)
    for name in NAMES:
        expected = torch.zeros_like(given[name]) if name == lacking else given[name]
        assert torch.equal(found[name], expected.float())


def test_what_another_block_left_is_never_seen_again(sums: Sums) -> None:
    sums.begin(0)
    sums.add(0, 1, {"1.0": torch.full((9, 61), 9.0), "1.1": torch.full((2, 2), 9.0)})
    drained(sums, 1)
    sum_up(sums, [parts(2), parts(3)])
    total = sum(flat.abs().sum() for flat in drained(sums))
    expected = [parts(2)[name].float() + parts(3)[name].float() for name in NAMES]
    assert total == pytest.approx(float(sum(part.abs().sum() for part in expected)))


def test_padding_is_zero_also_in_fresh_memory(sums: Sums) -> None:
    sum_up(sums, [parts(4), parts(5)])
    (flat,) = drained(sums)
    padding = torch.ones(len(flat), dtype=torch.bool)
    for name in NAMES:
        place = LAYOUT.places[name]
        padding[place.start : place.start + place.param.num_elements] = False
    assert padding.sum() == 3 * ALIGN - 35 - 3 - 130
    assert not flat[padding].any()
    assert flat.isfinite().all()


# Law 4: a part may come as several, some rows each.


@pytest.mark.parametrize("kind", ["home", "slots"])
@pytest.mark.parametrize("cuts", [(0, 5), (0, 2, 5), (0, 1, 2, 3, 4, 5)])
def test_rows_that_come_by_and_by_give_the_same_sum(cuts: tuple[int, ...], kind: str) -> None:
    whole, cut = made(kind), made(kind)
    given = [parts(seed) for seed in (1, 2, 3)]
    sum_up(whole, given)
    cut.begin(0)
    for part in given:
        cut.add(0, 0, {name: part[name] for name in ("0.2", "0.3")})
        for start, stop in pairwise(cuts):
            cut.add(0, 0, {"0.0": part["0.0"][start:stop]}, start)
    expected, found = read(whole), read(cut)
    assert all(torch.equal(found[name], expected[name]) for name in NAMES)


def test_rows_that_leave_a_gap_are_refused(sums: Sums) -> None:
    sums.begin(0)
    sums.add(0, 0, {"0.0": parts(1)["0.0"][:2]}, 0)
    with pytest.raises(AssertionError, match="rows 3 to 5 of a sum that has 2"):
        sums.add(0, 0, {"0.0": parts(1)["0.0"][3:]}, 3)
