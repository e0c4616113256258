"""Laws of home_sums.py: with a home, sums are those of a slot, and as little as possible moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.engine.gradients.home_sums import HomeSums
from megatrain.engine.gradients.slots import GradSlots
from megatrain.memory.layout import ALIGN
from tests.engine.gradients.made_parts import BF16, FP32, LAYOUT, NAMES, empty, parts, read


def memory(dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """The host's memory for block 0, full of something else, and its params there."""
    (segment,) = LAYOUT.trained_segments(0)
    flat = torch.full((segment.num_elements,), float("nan"), dtype=dtype)
    places = [LAYOUT.places[name] for name in NAMES]
    homes = {
        p.param.name: flat[p.start : p.start + p.param.num_elements].view(p.param.shape)
        for p in places
    }
    return flat, homes


def summed_at_home(dtype: torch.dtype, given: list[dict[str, Tensor]], ids: Tensor) -> Tensor:
    """0.0 where it is drained to: of each part some rows at a time, and then the rows `ids`."""
    flat, homes = memory(dtype)
    sums = HomeSums(GradSlots(LAYOUT, {0: [0]}, empty), homes)
    sums.begin(0)
    for part in given:
        for start, stop in ((0, 2), (2, 5)):
            sums.add(0, 0, {"0.0": part["0.0"][start:stop].clone()}, start)
    for seed in range(max(1, len(given))):
        sums.add_rows(0, 0, "0.0", ids, parts(10 + seed)["0.0"][: len(ids)])
    sums.drain(0, 0, [(LAYOUT.trained_segments(0)[0], flat)])
    return homes["0.0"]


def summed_whole(given: list[dict[str, Tensor]], ids: Tensor) -> Tensor:
    """The same in fp32, with parts that are zero but for the rows `ids`."""
    total = torch.zeros(5, 7)
    for part in given:
        total += part["0.0"].float()
    for seed in range(max(1, len(given))):
        dense = torch.zeros(5, 7)
        dense[ids] = parts(10 + seed)["0.0"][: len(ids)].float()
        total += dense
    return total


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("ids", [[1, 3], [0, 1, 2, 3, 4]])
def test_sums_at_home_are_those_in_a_slot_rounded_once(
    dtype: torch.dtype, count: int, ids: list[int]
) -> None:
    given, numbers = [parts(seed) for seed in range(count)], torch.tensor(ids)
    found = summed_at_home(dtype, given, numbers)
    assert torch.equal(found, summed_whole(given, numbers).to(dtype))


def test_a_sum_that_is_rounded_twice_would_be_noticed() -> None:
    given, numbers = [parts(seed) for seed in range(2)], torch.arange(5)
    found = summed_at_home(BF16, given, numbers)
    halfway = summed_whole(given[:1], numbers).bfloat16() + given[1]["0.0"]
    assert not torch.equal(found, halfway)


def test_one_part_by_rows_is_at_home_and_nowhere_else() -> None:
    (_, homes), written_to = memory(BF16), torch.zeros(3 * ALIGN)
    slots = GradSlots(LAYOUT, {0: [0]}, lambda _: written_to.view(torch.uint8))
    sums = HomeSums(slots, homes)
    sums.begin(0)
    sums.add(0, 0, {"0.0": parts(1)["0.0"]}, 0)
    assert torch.equal(homes["0.0"], parts(1)["0.0"])
    assert not written_to.any()
    sums.add(0, 0, {"0.0": parts(2)["0.0"]}, 0)
    assert written_to.any()  # the second makes it a sum, in fp32


def test_rows_alone_leave_zeros_between_them() -> None:
    sums = HomeSums(GradSlots(LAYOUT, {0: [0]}, empty), {})
    sums.begin(0)
    sums.add_rows(0, 0, "0.0", torch.tensor([4]), torch.ones(1, 7))
    found = read(sums)["0.0"]
    assert torch.equal(found[4], torch.ones(7))
    assert not found[:4].any()
