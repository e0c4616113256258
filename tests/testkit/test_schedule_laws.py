"""Laws of schedules: every shape keeps them, and whoever breaks one is found, by text.

Three groups: all small shapes pass; broken schedules fail; a dropped declaration fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatrain.errors import ScheduleError
from megatrain.step.ops import Op, OpKind
from megatrain.step.schedule import build_step
from megatrain.step.shape import StepShape
from testkit.cases import at_a_push
from testkit.schedule_laws import (
    check_ranks_meet,
    check_schedules,
    meets,
    one_lane_per_kind,
)
from testkit.toys import short_life, two_steps

# All small shapes pass.


def frozen_patterns(num_blocks: int) -> set[tuple[bool, ...]]:
    """All trained; the embedding frozen; the upper half; every other one; the head alone."""
    blocks = range(num_blocks)
    return {
        tuple(True for _ in blocks),
        tuple(block > 0 for block in blocks),
        tuple(block > num_blocks // 2 for block in blocks),
        tuple(block % 2 == 0 for block in blocks),
        tuple(block == num_blocks - 1 for block in blocks),
    }


def small_shapes(num_layers: int) -> Iterator[StepShape]:
    rings: list[dict[str, Any]] = [
        {"tape": "device"},
        {"tape": "host", "tape_slots": 2},
        {"tape": "host", "tape_slots": 3},
    ]
    copying: list[dict[str, Any]] = [
        {"copying": False},
        *({"copying": True, "slots": slots} for slots in (2, 3, 4)),
        {"copying": True, "slots": 2 + num_layers % 2, "divided": True},
    ]
    updates = [
        ("none", "none"),
        ("second_backward", "none"),
        *itertools.product(("in_backward", "late"), ("none", "states")),
    ]
    for trained, num_micro, ring, copies, (update, tier), tied in itertools.product(
        sorted(frozen_patterns(num_layers + 2)),
        (0, 1, 2, 3, 4),
        rings,
        copying,
        updates,
        (False, True),
    ):
        if tier != "none" and (ring["tape"] == "host" or copies.get("slots", 2) > 2):
            continue  # tape and slots are far from the disk
        divided = "divided" in copies
        if num_micro == (4 if divided else 0):
            continue
        gathers = not tied and copies["copying"] and not divided and num_layers % 4 > 1
        pages = copies["copying"] and not divided and (num_layers + num_micro) % 2 == 0
        yield StepShape(
            num_blocks=num_layers + 2,
            num_micro=num_micro,
            update=update,
            tier=tier,
            tier_slots=1 + (num_micro + num_layers) % 3,
            grad_slots=1 + (num_micro + num_layers) % 2,
            host_grads=2 + num_micro % 2,
            kept_layers=0 if update == "second_backward" else (num_layers + num_micro) % 4,
            tied=tied,
            gather_embedding=gathers,
            balances=(num_micro + num_layers) % 3 == 0,
            pages=pages,
            trained=trained,
            **ring,
            **copies,
        )


def with_matrices(num_layers: int) -> Iterator[StepShape]:
    """Some of the small shapes, with matrices in all trained layers or in every other one."""
    for number, shape in enumerate(small_shapes(num_layers)):
        fits = shape.update != "none"
        flags = [shape.trained[block] and block in shape.layers for block in range(num_layers + 2)]
        if number % 2:
            flags = [flag and block % 2 == 1 for block, flag in enumerate(flags)]
        if fits and number % 5 < 2 and any(flags):
            yield replace(shape, matrices=tuple(flags))


@pytest.mark.parametrize("part", at_a_push(range(4), 1))
@pytest.mark.parametrize(
    "num_layers",
    [*range(1, 6), *(pytest.param(n, marks=pytest.mark.merge) for n in range(6, 9))],
)
def test_every_small_shape_keeps_all_laws(num_layers: int, part: int) -> None:
    for shape in itertools.islice(small_shapes(num_layers), part, None, 4):
        check_schedules(shape, two_steps(shape))


@pytest.mark.parametrize(
    "num_layers", [1, 3, *(pytest.param(n, marks=pytest.mark.merge) for n in (2, 4, 5))]
)
def test_so_do_shapes_with_matrices(num_layers: int) -> None:
    for shape in with_matrices(num_layers):
        check_schedules(shape, two_steps(shape))


@pytest.mark.parametrize(
    "num_layers", [1, *(pytest.param(n, marks=pytest.mark.merge) for n in (2, 5))]
)
def test_declarations_alone_order_the_ops(num_layers: int) -> None:
    for shape in itertools.chain(small_shapes(num_layers), with_matrices(num_layers)):
        if shape.num_micro == 2:
            check_schedules(shape, map(one_lane_per_kind, short_life(shape)))


# Broken schedules fail, and the text says where and why.

LATE = StepShape(num_blocks=6, num_micro=2, tape="host", update="late", tied=True)
IN_BACKWARD = StepShape(num_blocks=6, num_micro=2, update="in_backward")
TIERED = replace(LATE, tape="device", tied=False, tier="states", tier_slots=2)
RANKS = replace(IN_BACKWARD, divided=True)
KEPT = replace(LATE, kept_layers=2, tied=False)
Edit = Callable[[list[Op]], list[Op]]


def without(name: str, *, last: bool = False) -> Edit:
    """Leave out the first, or the last, op of that name."""

    def edit(ops: list[Op]) -> list[Op]:
        found = [number for number, op in enumerate(ops) if str(op) == name]
        where = found[-1 if last else 0]
        return ops[:where] + ops[where + 1 :]

    return edit


def twice(name: str) -> Edit:
    return lambda ops: [copy for op in ops for copy in [op] * (1 + (str(op) == name))]


def first(name: str) -> Edit:
    """Move the ops of that name to the front."""
    return lambda ops: sorted(ops, key=lambda op: str(op) != name)


def swapped(name: str, other: str) -> Edit:
    def edit(ops: list[Op]) -> list[Op]:
        by_name = {str(op): op for op in ops}
        places = {name: by_name[other], other: by_name[name]}
        return [places.get(str(op), op) for op in ops]

    return edit


BROKEN: list[tuple[StepShape, Edit, str]] = [
    # weights: the right block at the right version
    (
        LATE,
        without("FETCH(2)", last=True),
        "list 1, at BACKWARD(2,0): slot[1] holds the weights of block 4 at version 1, "
        "needed is the weights of block 2 at version 1",
    ),
    (
        IN_BACKWARD,
        without("FETCH(0)"),
        "list 1, at FORWARD(0,0): slot[embedding] holds the weights of block 0 at version 0, "
        "needed is the weights of block 0 at version 1",
    ),
    # tape: every input kept, moved and used once
    (
        LATE,
        without("STASH(1,0)"),
        "list 1, at FORWARD(2,0): tape_slot[0] still holds the input of block 1 for micro-batch "
        "0 in step 1, there is no room for the input of block 2 for micro-batch 0 in step 1",
    ),
    (
        LATE,
        without("RESTORE(1,1)"),
        "list 1, at BACKWARD(1,1): tape_slot[1] holds nothing, "
        "needed is the input of block 1 for micro-batch 1 in step 1",
    ),
    # gradients: whole, in order, drained once
    (
        LATE,
        twice("DRAIN(2)"),
        "list 1, at DRAIN(2): grad_slot[0] holds nothing, "
        "needed is the gradient of block 2 in step 1 with 2 of its parts",
    ),
    (
        LATE,
        without("DRAIN(1)"),
        "list 1, at NORM(1): grad[1] holds nothing, "
        "needed is the gradient of block 1 in step 1 with 2 of its parts",
    ),
    (
        LATE,
        without("NORM(1)"),
        "list 1, at CLIP: norm[1] holds the norm of block 1 in step 0, "
        "needed is the norm of block 1 in step 1",
    ),
    # updates: once, after their gradient and their clip factor
    (
        LATE,
        first("CLIP"),
        "list 1, at CLIP: norm[0] holds the norm of block 0 in step 0, "
        "needed is the norm of block 0 in step 1",
    ),
    (
        IN_BACKWARD,
        without("UPDATE(0)"),
        "list 1, at the end: weights[0] holds the weights of block 0 at version 1, "
        "needed is the weights of block 0 at version 2",
    ),
    # the disk: read at the right version, before its update, and written back behind it
    (
        TIERED,
        without("READ(3)"),
        "list 1, at UPDATE(3): tier_slot[0] holds the master of block 1 at version 1, "
        "needed is the master of block 3 at version 0",
    ),
    (
        TIERED,
        without("WRITE(2)"),
        "list 1, at READ(2): master[2] holds the master of block 2 at version 0, "
        "needed is the master of block 2 at version 1",
    ),
    # ranks: weights gathered before they are used, gradients exchanged once, whole, before they go
    (
        RANKS,
        without("GATHER(2)"),
        "list 1, at FORWARD(2,0): slot[1] holds the part of this rank of the weights of block 2 at "
        "version 1, needed is the weights of block 2 at version 1",
    ),
    (
        RANKS,
        without("EXCHANGE(3)"),
        "list 1, at DRAIN(3): grad_slot[1] holds the gradient of block 3 in step 1 with 2 of its "
        "parts, needed is the gradient of block 3 in step 1, added up over all ranks",
    ),
    # activations that stay: of the top layers, and of no other
    (
        KEPT,
        without("BACKWARD(3,1)"),
        "list 1, at DRAIN(3): grad_slot[1] holds the gradient of block 3 in step 1 with 1 of its "
        "parts, needed is the gradient of block 3 in step 1 with 2 of its parts",
    ),
    # hidden states
    (
        IN_BACKWARD,
        without("FORWARD(3,0)"),
        "list 1, at FORWARD(4,0): hidden[0] holds the output of block 2 for micro-batch 0 in "
        "list 1, needed is the output of block 3 for micro-batch 0 in list 1",
    ),
]


@pytest.mark.parametrize(("shape", "edit", "text"), BROKEN)
def test_a_broken_step_is_found(shape: StepShape, edit: Edit, text: str) -> None:
    whole = build_step(shape, pending=shape.update == "late")
    check_schedules(shape, [build_step(shape), whole])
    with pytest.raises(ScheduleError) as caught:
        check_schedules(shape, [build_step(shape), edit(whole)])
    assert str(caught.value) == text


# A dropped declaration fails.


def test_a_race_is_told_by_both_sides() -> None:
    ops = [replace(op, writes=()) if op.kind is OpKind.FETCH else op for op in build_step(LATE)]
    with pytest.raises(ScheduleError) as caught:
        check_schedules(LATE, [ops])
    assert str(caught.value) == (
        "list 0, at FORWARD(0,0): may overtake FETCH(0) on lane in, by which slot[embedding] is "
        "written"
    )


# Ranks whose steps differ in nothing but their micro-batches.


def of_ranks(shape: StepShape, num_micro: Sequence[int]) -> list[StepShape]:
    return [replace(shape, num_micro=number, divided=True, copying=True) for number in num_micro]


def rank_shapes(num_layers: int) -> Iterator[list[StepShape]]:
    for number, shape in enumerate(small_shapes(num_layers)):
        if shape.divided and shape.num_micro == 2:
            yield of_ranks(shape, [(2, 1), (1, 0), (3, 2, 2), (1, 1, 0, 0)][number % 4])


def meetings(shape: StepShape) -> list[str]:
    return [str(op) for ops in short_life(shape) for op in ops if meets(shape, op)]


@pytest.mark.few(2)
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_ranks_meet_in_one_order_whatever_their_micro_batches(num_layers: int) -> None:
    """What they do together is one list, so that no rank waits for one that waits for it."""
    for shapes in rank_shapes(num_layers):
        assert len({tuple(meetings(shape)) for shape in shapes}) == 1
        check_ranks_meet(shapes, [short_life(shape) for shape in shapes])


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (without("EXCHANGE(3)"), "EXCHANGE"),
        (swapped("GATHER(2)", "GATHER(1)"), "GATHER"),
        (first("NORM(2)"), "NORM"),
        (swapped("EXCHANGE(3)", "GATHER(2)"), "EXCHANGE"),
    ],
)
def test_a_rank_that_goes_another_way_is_found(edit: Edit, text: str) -> None:
    shapes = of_ranks(IN_BACKWARD, (2, 1))
    lists = [[build_step(shape)] for shape in shapes]
    check_ranks_meet(shapes, lists)
    lists[1] = [edit(build_step(shapes[1]))]
    with pytest.raises(ScheduleError, match=f"ranks wait for each other: .*{text}"):
        check_ranks_meet(shapes, lists)


@pytest.mark.parametrize("tied", [True, False])
def test_a_table_that_adds_up_in_the_ring_unannounced_is_noticed(*, tied: bool) -> None:
    shape = StepShape(num_blocks=4, tied=tied, update="second_backward", copying=False)
    ops = build_step(shape)
    check_schedules(shape, [ops, ops])
    silent = [
        replace(op, writes=tuple(place for place in op.writes if place[0] != "host_grad"))
        if op.kind in (OpKind.HEAD, OpKind.BACKWARD)
        else op
        for op in ops
    ]
    with pytest.raises(ScheduleError, match=r"may overtake NORM\(3\) on lane host"):
        check_schedules(shape, [silent])
