"""Laws of grad_slots.py: sums in fp32, in order; no offset shifts; nothing old is seen again."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatrain.engine.grad_slots import GradSlots, Tenant
from megatrain.memory.layout import ALIGN, build_layout
from megatrain.models.decoder import Block, Param
from megatrain.optim.states import WITH_CLIP
from megatrain.step.ops import Role, SlotId

BF16, FP32 = torch.bfloat16, torch.float32


def block(index: int, *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = ()) -> Block:
    return Block(
        index=index,
        role=Role.LAYER,
        params=tuple(
            Param(
                name=f"{index}.{number}",
                shape=shape,
                dtype=dtypes[number] if dtypes else BF16,
                trained=shape != (13,),
            )
            for number, shape in enumerate(shapes)
        ),
    )


# Sizes that are no multiples of the alignment; a frozen param; one in fp32 among bf16.
BLOCKS = [
    block(0, (5, 7), (13,), (3,), (130,)),
    block(1, (9, 61), (2, 2), dtypes=(BF16, FP32)),
]
LAYOUT = build_layout(BLOCKS, WITH_CLIP)
NAMES = ["0.0", "0.2", "0.3"]


def empty(num_bytes: int) -> Tensor:
    """Memory as it comes: full of what was there before."""
    return torch.full((num_bytes // 4,), float("nan")).view(torch.uint8)


@pytest.fixture(params=[False, True], ids=["copies", "keeps the first part"])
def slots(request: pytest.FixtureRequest) -> GradSlots:
    return GradSlots(LAYOUT, {0: [(0, 0), (1, 0)]}, empty, keeps_first=request.param)


def parts(seed: int, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    params = {param.name: param for param in BLOCKS[0].params}
    return {n: torch.randn(params[n].shape, generator=generator).to(dtype) for n in NAMES}


def written(slots: GradSlots, block: int = 0) -> list[Tensor]:
    """The sums as they are drained, into memory full of something else."""
    segments = LAYOUT.trained_segments(block)
    targets = [torch.full((segment.num_elements,), float("nan")) for segment in segments]
    slots.move_out(0, (block, 0), targets)
    return targets


def read(slots: GradSlots) -> dict[str, Tensor]:
    """The sums of block 0 by param, where an update will look for them."""
    (flat,) = written(slots)
    places = [LAYOUT.places[name] for name in NAMES]
    return {
        p.param.name: flat[p.start : p.start + p.param.num_elements].view(p.param.shape)
        for p in places
    }


def sum_up(slots: GradSlots, given: list[dict[str, Tensor]]) -> None:
    slots.begin(0)
    for part in given:
        slots.add(0, (0, 0), {name: grad.clone() for name, grad in part.items()})


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_sums_are_in_fp32_in_the_order_of_the_parts(
    slots: GradSlots, dtype: torch.dtype, count: int
) -> None:
    given = [parts(seed, dtype) for seed in range(count)]
    sum_up(slots, given)
    found = read(slots)
    for name in NAMES:
        total = given[0][name].float()
        for part in given[1:]:
            total = total + part[name].float()
        assert torch.equal(found[name], total)


def test_a_sum_in_bf16_or_in_another_order_would_be_noticed(slots: GradSlots) -> None:
    given = [parts(seed, FP32) for seed in range(5)]
    sum_up(slots, given)
    wide = read(slots)["0.3"]
    backwards = sum((part["0.3"] for part in reversed(given)), torch.zeros(130))
    narrow = sum((part["0.3"].bfloat16() for part in given), torch.zeros(130, dtype=BF16))
    assert not torch.equal(wide, backwards)
    assert not torch.equal(wide, narrow.float())


@pytest.mark.parametrize("lacking", NAMES)
def test_a_param_without_a_gradient_counts_as_zero_and_shifts_nothing(
    slots: GradSlots, lacking: str
) -> None:
    sum_up(slots, [parts(1)])  # something to be forgotten
    given = parts(3)
    slots.begin(0)
    slots.add(0, (0, 0), {name: None if name == lacking else grad for name, grad in given.items()})
    slots.add(0, (0, 0), {})
    found = read(slots)
    for name in NAMES:
        expected = torch.zeros_like(given[name]) if name == lacking else given[name]
        assert torch.equal(found[name], expected.float())


def test_what_another_block_left_is_never_seen_again(slots: GradSlots) -> None:
    slots.begin(0)
    slots.add(0, (1, 0), {"1.0": torch.full((9, 61), 9.0), "1.1": torch.full((2, 2), 9.0)})
    written(slots, 1)
    sum_up(slots, [parts(2), parts(3)])
    total = sum(flat.abs().sum() for flat in written(slots))
    sums = [parts(2)[name].float() + parts(3)[name].float() for name in NAMES]
    assert total == pytest.approx(float(sum(part.abs().sum() for part in sums)))


def test_padding_is_zero_also_in_fresh_memory(slots: GradSlots) -> None:
    sum_up(slots, [parts(4), parts(5)])
    (flat,) = written(slots)
    padding = torch.ones(len(flat), dtype=torch.bool)
    for name in NAMES:
        place = LAYOUT.places[name]
        padding[place.start : place.start + place.param.num_elements] = False
    assert padding.sum() == 3 * ALIGN - 35 - 3 - 130
    assert not flat[padding].any()
    assert flat.isfinite().all()


def test_a_slot_is_as_large_as_its_largest_user() -> None:
    sizes: list[int] = []

    def allocate(num_bytes: int) -> Tensor:
        sizes.append(num_bytes)
        return empty(num_bytes)

    GradSlots(LAYOUT, {0: [(0, 0)], "edge": [(1, 0)]}, allocate, keeps_first=False)
    assert sizes == [4 * 3 * ALIGN, 4 * 4 * ALIGN]


# Law 5: a part may come as several, some rows each.


@pytest.mark.parametrize("cuts", [(0, 5), (0, 2, 5), (0, 1, 2, 3, 4, 5)])
def test_rows_that_come_by_and_by_give_the_same_sum(cuts: tuple[int, ...]) -> None:
    whole, cut = (GradSlots(LAYOUT, {0: [(0, 0)]}, empty, keeps_first=False) for _ in range(2))
    given = [parts(seed) for seed in (1, 2, 3)]
    sum_up(whole, given)
    cut.begin(0)
    for part in given:
        cut.add(0, (0, 0), {name: part[name] for name in ("0.2", "0.3")})
        for start, stop in pairwise(cuts):
            cut.add(0, (0, 0), {"0.0": part["0.0"][start:stop]}, start)
    expected, found = read(whole), read(cut)
    assert all(torch.equal(found[name], expected[name]) for name in NAMES)


# With homes: where gradients will be, in the dtype of the host.


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
    slots = GradSlots(LAYOUT, {0: [(0, 0)]}, empty, keeps_first=True, homes=homes)
    slots.begin(0)
    for part in given:
        for start, stop in ((0, 2), (2, 5)):
            slots.add(0, (0, 0), {"0.0": part["0.0"][start:stop].clone()}, start)
    for seed in range(max(1, len(given))):
        slots.add_rows(0, (0, 0), "0.0", ids, parts(10 + seed)["0.0"][: len(ids)])
    slots.move_out(0, (0, 0), [flat])
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
    slots = GradSlots(
        LAYOUT,
        {0: [(0, 0)]},
        lambda _: written_to.view(torch.uint8),
        keeps_first=True,
        homes=homes,
    )
    slots.begin(0)
    slots.add(0, (0, 0), {"0.0": parts(1)["0.0"]}, 0)
    assert torch.equal(homes["0.0"], parts(1)["0.0"])
    assert not written_to.any()
    slots.add(0, (0, 0), {"0.0": parts(2)["0.0"]}, 0)
    assert written_to.any()  # the second makes it a sum, in fp32


def test_rows_alone_leave_zeros_between_them() -> None:
    slots = GradSlots(LAYOUT, {0: [(0, 0)]}, empty, keeps_first=True)
    slots.begin(0)
    slots.add_rows(0, (0, 0), "0.0", torch.tensor([4]), torch.ones(1, 7))
    found = read(slots)["0.0"]
    assert torch.equal(found[4], torch.ones(7))
    assert not found[:4].any()


def test_rows_that_leave_a_gap_are_refused() -> None:
    slots = GradSlots(LAYOUT, {0: [(0, 0)]}, empty, keeps_first=False)
    slots.begin(0)
    slots.add(0, (0, 0), {"0.0": parts(1)["0.0"][:2]}, 0)
    with pytest.raises(AssertionError, match="rows 3 to 5 of a sum that has 2"):
        slots.add(0, (0, 0), {"0.0": parts(1)["0.0"][3:]}, 3)


# Law 4: a block by pieces.

CUTS = {"1.0": [slice(0, 4), slice(4, 8), slice(8, 9)]}
PIECES = [(1, piece) for piece in range(3)]


def by_pieces(*, keeps_first: bool, left_out: int | None = None) -> list[Tensor]:
    """Block 1, of which 1.0 goes by rows and 1.1 with the last piece, each of two parts."""
    slots = GradSlots(
        LAYOUT,
        {0: [PIECES[0], PIECES[2]], 1: [PIECES[1]]},
        empty,
        keeps_first=keeps_first,
        cuts=CUTS,
    )
    segments = LAYOUT.trained_segments(1)
    targets = [torch.full((segment.num_elements,), float("nan")) for segment in segments]
    first, second = (torch.arange(549.0).view(9, 61) * part for part in (1.0, 0.3))
    for (block, piece), rows in zip(PIECES, CUTS["1.0"], strict=True):
        slots.begin(piece % 2)
        for part in (first, second):
            slots.add(piece % 2, (block, piece), {"1.0": part[rows].clone()})
            if piece == 2:
                slots.add(piece % 2, (block, piece), {"1.1": torch.ones(2, 2)})
        if piece != left_out:
            slots.move_out(piece % 2, (block, piece), targets)
    return targets


@pytest.mark.parametrize("keeps_first", [False, True])
def test_pieces_one_after_another_write_the_whole_gradient(keeps_first: bool) -> None:
    rows, others = by_pieces(keeps_first=keeps_first)
    total = torch.arange(549.0) + torch.arange(549.0) * 0.3
    assert torch.equal(rows[:549], total)
    assert torch.equal(others[:4], torch.full((4,), 2.0))
    assert not rows[549:].any()
    assert not others[4:].any()


@pytest.mark.parametrize("piece", range(3))
def test_a_piece_that_is_left_out_would_be_noticed(piece: int) -> None:
    assert any(target.isnan().any() for target in by_pieces(keeps_first=False, left_out=piece))


def test_a_slot_of_pieces_is_as_large_as_the_largest_of_them() -> None:
    sizes: list[int] = []

    def allocate(num_bytes: int) -> Tensor:
        sizes.append(num_bytes)
        return empty(num_bytes)

    GradSlots(LAYOUT, {0: PIECES}, allocate, keeps_first=False, cuts=CUTS)
    assert sizes == [4 * 2 * ALIGN]  # the last piece has one row, and the other param


# Law 6: a param of which only some rows are there.


def test_rows_have_the_room_that_was_reserved_and_no_more() -> None:
    sizes: list[int] = []

    def allocate(num_bytes: int) -> Tensor:
        sizes.append(num_bytes)
        return empty(num_bytes)

    users: dict[SlotId, list[Tenant]] = {0: [(0, 0)], 1: [(1, 0)]}
    slots = GradSlots(LAYOUT, users, allocate, keeps_first=False, gathered="1.0")
    assert sizes == [4 * 3 * ALIGN]
    for num_rows, needed in ((2, 2 * ALIGN), (3, 0), (6, 3 * ALIGN), (1, 0)):
        del sizes[:]
        slots.reserve(num_rows)
        assert sizes == ([4 * needed] if needed else [])
        rows = torch.arange(num_rows * 61.0).view(-1, 61)
        slots.begin(1)
        slots.add(1, (1, 0), {"1.0": rows})
        slots.add(1, (1, 0), {"1.0": rows, "1.1": torch.ones(2, 2)})
        found = {name: total for name, *_, total in slots.parts(1, (1, 0)) if total is not None}
        assert torch.equal(found["1.0"], 2 * rows)
        assert torch.equal(found["1.1"], torch.ones(2, 2))
