"""Laws of schedules: every shape keeps them, and whoever breaks one is found, by text.

Three groups: all small shapes pass; broken schedules fail; dropped declarations fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from megatrain.errors import ScheduleError
from megatrain.step.ops import Op, OpKind, SlotId
from megatrain.step.shape import StepShape
from testkit.cases import at_a_push
from testkit.schedule_laws import (
    check_ranks_meet,
    check_schedules,
    meets,
    one_lane_per_kind,
)
from testkit.schedules import build_flush, build_forward, build_step
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
        *itertools.product(("in_backward", "late", "second_backward"), ("none", "states")),
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


def test_small_shapes_are_more_than_ten_thousand() -> None:
    shapes = [shape for num_layers in range(1, 9) for shape in small_shapes(num_layers)]
    assert len(set(shapes)) == len(shapes) > 10_000


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
IDLE = replace(LATE, divided=True, num_micro=0)
FROZEN = StepShape(num_blocks=6, update="late", trained=(True, True, False, True, True, True))
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


def changed(name: str, **fields: Any) -> Edit:
    return lambda ops: [replace(op, **fields) if str(op) == name else op for op in ops]


def moved(name: str, family: str, slot: SlotId) -> Edit:
    """Let ops of that name find what they touch in a family of slots in another one of them."""

    def move(op: Op) -> Op:
        used = {*op.reads, *op.writes}
        things = [thing for thing, place in op.places.items() if place in used]
        there = {thing: (family, slot) for thing in things if op.places[thing][0] == family}
        return replace(op, places={**op.places, **there})

    return lambda ops: [move(op) if str(op) == name else op for op in ops]


BROKEN: list[tuple[StepShape, Edit, str]] = [
    # weights: the right block at the right version
    (
        LATE,
        without("FETCH(2)", last=True),
        "list 1, at BACKWARD(2,0): slot[1] holds the weights of block 4 at version 1, "
        "needed is the weights of block 2 at version 1",
    ),
    (
        LATE,
        first("FETCH(1)"),
        "list 1, at FETCH(1): weights[1] holds the weights of block 1 at version 0, "
        "needed is the weights of block 1 at version 1",
    ),
    (
        IN_BACKWARD,
        without("FETCH(0)"),
        "list 1, at FORWARD(0,0): slot[embedding] holds the weights of block 0 at version 0, "
        "needed is the weights of block 0 at version 1",
    ),
    (
        IN_BACKWARD,
        moved("FETCH(2)", "slot", 0),
        "list 1, at FORWARD(1,0): slot[0] holds the weights of block 2 at version 1, "
        "needed is the weights of block 1 at version 1",
    ),
    (
        IN_BACKWARD,
        moved("FETCH(2)", "slot", 2),
        "list 1, at FETCH(2): slot[2] does not exist, the plan has 2",
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
    (
        LATE,
        moved("RESTORE(3,0)", "tape_slot", 1),
        "list 1, at RESTORE(3,0): tape_slot[1] still holds the input of block 4 for micro-batch "
        "1 in step 1, there is no room for the input of block 3 for micro-batch 0 in step 1",
    ),
    (
        IN_BACKWARD,
        without("BACKWARD(0,1)"),
        "list 1, at DRAIN(0): grad_slot[edge] holds the gradient of block 0 in step 1 with 1 of "
        "its parts, needed is the gradient of block 0 in step 1 with 2 of its parts",
    ),
    # gradients: whole, in order, drained once
    (
        LATE,
        swapped("HEAD(5,0)", "HEAD(5,1)"),
        "list 1, at HEAD(5,1): grad_slot[head] holds nothing, "
        "needed is the gradient of block 5 in step 1 with 1 of its parts",
    ),
    (
        LATE,
        changed("BACKWARD(0,0)", adds=False),
        "list 1, at BACKWARD(0,0): grad_slot[edge] still holds the gradient of block 0 in step 1 "
        "with 2 of its parts, there is no room for the gradient of block 0 in step 1 with 1 of "
        "its parts",
    ),
    (
        LATE,
        changed("BACKWARD(3,1)", adds=False),
        "list 1, at BACKWARD(3,1): grad_slot[1] still holds the gradient of block 3 in step 1 "
        "with 1 of its parts, there is no room for the gradient of block 3 in step 1 with 1 of "
        "its parts",
    ),
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
    (
        replace(LATE, update="none"),
        without("DRAIN(1)"),
        "list 1, at NORM(1): grad[1] holds nothing, "
        "needed is the gradient of block 1 in step 1 with 2 of its parts",
    ),
    (
        replace(IN_BACKWARD, tied=True),
        moved("DRAIN(5)", "grad_slot", "edge"),
        "list 1, at DRAIN(5): grad_slot[edge] holds the gradient of block 0 in step 1 with 2 of "
        "its parts, needed is the gradient of block 5 in step 1 with 2 of its parts",
    ),
    # updates: once, after their gradient and their clip factor
    (
        LATE,
        without("CLIP"),
        "list 1, at the end: clip holds the clip factor of step 0, "
        "needed is the clip factor of step 1",
    ),
    (
        LATE,
        first("CLIP"),
        "list 1, at CLIP: norm[0] holds the norm of block 0 in step 0, "
        "needed is the norm of block 0 in step 1",
    ),
    (
        LATE,
        twice("UPDATE(4)"),
        "list 1, at UPDATE(4): grad[4] holds nothing, "
        "needed is the gradient of block 4 in step 0 with 2 of its parts",
    ),
    (
        IN_BACKWARD,
        without("UPDATE(0)"),
        "list 1, at the end: weights[0] holds the weights of block 0 at version 1, "
        "needed is the weights of block 0 at version 2",
    ),
    (
        IN_BACKWARD,
        swapped("NORM(3)", "UPDATE(3)"),
        "list 1, at UPDATE(3): norm[3] holds the norm of block 3 in step 0, "
        "needed is the norm of block 3 in step 1",
    ),
    (
        FROZEN,
        without("BACKWARD(2,0)"),
        "list 1, at BACKWARD(1,0): dhidden[0] holds the input gradient of block 3 for "
        "micro-batch 0 in step 1, needed is the input gradient of block 2 for micro-batch 0 in "
        "step 1",
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
    (
        TIERED,
        first("WRITE(1)"),
        "list 1, at WRITE(1): tier_slot[0] holds the master of block 1 at version 0, "
        "needed is the master of block 1 at version 1",
    ),
    (
        TIERED,
        first("READ(3)"),
        "list 1, at UPDATE(1): tier_slot[0] holds the master of block 3 at version 0, "
        "needed is the master of block 1 at version 0",
    ),
    (
        TIERED,
        moved("READ(4)", "tier_slot", 2),
        "list 1, at READ(4): tier_slot[2] does not exist, the plan has 2",
    ),
    (
        replace(IN_BACKWARD, tier="states"),
        without("WRITE(0)"),
        "list 1, at the end: master[0] holds the master of block 0 at version 1, "
        "needed is the master of block 0 at version 2",
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
        twice("GATHER(5)"),
        "list 1, at GATHER(5): slot[head] holds the weights of block 5 at version 1, needed is "
        "the part of this rank of the weights of block 5 at version 1",
    ),
    (
        RANKS,
        swapped("FETCH(0)", "GATHER(0)"),
        "list 1, at GATHER(0): slot[embedding] holds the weights of block 0 at version 0, needed "
        "is the part of this rank of the weights of block 0 at version 1",
    ),
    (
        RANKS,
        without("EXCHANGE(3)"),
        "list 1, at DRAIN(3): grad_slot[1] holds the gradient of block 3 in step 1 with 2 of its "
        "parts, needed is the gradient of block 3 in step 1, added up over all ranks",
    ),
    (
        RANKS,
        twice("EXCHANGE(3)"),
        "list 1, at EXCHANGE(3): grad_slot[1] holds the gradient of block 3 in step 1, "
        "added up over all ranks, needed is the gradient of block 3 in step 1 with 2 of its parts",
    ),
    (
        RANKS,
        swapped("EXCHANGE(3)", "BACKWARD(3,1)"),
        "list 1, at EXCHANGE(3): grad_slot[1] holds the gradient of block 3 in step 1 with 1 of "
        "its parts, needed is the gradient of block 3 in step 1 with 2 of its parts",
    ),
    (
        IDLE,
        without("EXCHANGE(0)"),
        "list 1, at DRAIN(0): grad_slot[edge] holds nothing, needed is the gradient of "
        "block 0 in step 1, added up over all ranks",
    ),
    # activations that stay: of the top layers, and of no other
    (
        KEPT,
        lambda ops: build_step(replace(KEPT, kept_layers=1), pending=True),
        "list 1, at STASH(3,0): tape_slot[0] holds nothing, needed is the input of block 3 for "
        "micro-batch 0 in step 1",
    ),
    (
        KEPT,
        lambda ops: build_step(replace(KEPT, kept_layers=3), pending=True),
        "list 1, at FORWARD(2,0): the op names no tape_slot",
    ),
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


def test_an_evaluation_before_the_flush_is_found() -> None:
    with pytest.raises(ScheduleError, match=r"weights\[0\] holds .* at version 0, needed .* 1$"):
        check_schedules(LATE, [build_step(LATE), build_forward(LATE)])


def test_a_flush_without_a_step_is_found() -> None:
    with pytest.raises(ScheduleError, match=r"^list 0, at UPDATE\(0\): clip holds nothing"):
        check_schedules(LATE, [build_flush(LATE)])


def test_a_missing_loss_is_found() -> None:
    ops = without("HEAD(5,1)")(build_forward(LATE))
    with pytest.raises(ScheduleError, match=r"at the end: loss\[1\] holds nothing"):
        check_schedules(LATE, [ops])


def test_an_op_without_its_place_is_found() -> None:
    ops = changed("FETCH(1)", places={})(build_step(LATE))
    with pytest.raises(ScheduleError, match=r"at FETCH\(1\): the op names no slot"):
        check_schedules(LATE, [ops])


# Dropped declarations fail: mutation of every (kind, reads or writes, family).

MATRICES = (False, True, True, True, True, False)
MUTANT_SHAPES = [
    StepShape(num_blocks=6, num_micro=2, tape="host", tape_slots=4, update="late", tied=True),
    StepShape(num_blocks=6, num_micro=2, update="in_backward", grad_slots=1),
    StepShape(num_blocks=5, num_micro=2, update="late", tied=True, copying=False),
    StepShape(num_blocks=4, copying=False, trained=(True, True, True, False)),
    StepShape(num_blocks=5, num_micro=2, update="in_backward", balances=True),
    StepShape(num_blocks=6, update="in_backward", tier="states", copying=False),
    StepShape(num_blocks=7, update="late", tier="states", tier_slots=1),
    StepShape(num_blocks=7, update="late", tier="states", copying=False),
    StepShape(
        num_blocks=4, num_micro=2, copying=False, balances=True, trained=(False, *[True] * 3)
    ),
    StepShape(num_blocks=4, num_micro=2, trained=(False, False, False, True)),
    StepShape(num_blocks=6, num_micro=2, update="late", tied=True, divided=True),
    StepShape(num_blocks=5, num_micro=0, update="in_backward", grad_slots=1, divided=True),
    StepShape(num_blocks=5, num_micro=2, update="late", divided=True, balances=True),
    StepShape(num_blocks=6, num_micro=2, tape="host", update="late", kept_layers=2),
    StepShape(num_blocks=6, num_micro=2, update="late", matrices=MATRICES),
    StepShape(num_blocks=6, update="late", matrices=MATRICES, tier="states", copying=False),
    StepShape(num_blocks=6, update="in_backward", matrices=MATRICES, divided=True),
    StepShape(num_blocks=6, update="in_backward", matrices=MATRICES, tier="states", grad_slots=1),
    StepShape(num_blocks=6, update="second_backward", matrices=MATRICES, copying=False),
    StepShape(num_blocks=5, num_micro=2, update="late", pages=True),
    StepShape(num_blocks=6, num_micro=2, update="in_backward", pages=True),
]
Mutant = tuple[OpKind, str, str | int]

EQUIVALENT: dict[Mutant, str] = {
    (
        OpKind.FORWARD,
        "reads",
        "hidden",
    ): "writes it too, and a write waits for more",
    (OpKind.HEAD, "reads", "grad_slot"): "writes it too",
    (OpKind.BACKWARD, "reads", "grad_slot"): "writes it too",
    (OpKind.FORWARD, "writes", "kept"): (
        "BACKWARD(b,m) is behind FORWARD(b,m) by hidden, HEAD and dhidden, and the next "
        "FORWARD(b,m) behind it by the gradient slot, DRAIN, UPDATE and weights"
    ),
    (OpKind.BACKWARD, "reads", "kept"): "the same, from the other side",
    (OpKind.FORWARD, "reads", "routing"): "writes it too",
    (OpKind.BALANCE, "reads", "routing"): "writes it too",
    (OpKind.GATHER, "reads", "slot"): "writes it too",
    (OpKind.EXCHANGE, "reads", "grad_slot"): "writes it too",
    (OpKind.UPDATE, "reads", "master"): "writes it too",
    (OpKind.UPDATE, "reads", "tier_slot"): "writes it too",
    (OpKind.READ, "reads", "master"): (
        "a block has one tier slot, and by that its READ is behind its last WRITE and before its "
        "next one"
    ),
    (OpKind.WRITE, "writes", "master"): "the same, from the other side",
    (OpKind.UPDATE, "writes", "master"): "UPDATE alone touches it, and weights too",
    (OpKind.HEAD, "writes", "loss"): "touched by HEAD alone; the caller waits for the HEAD itself",
    (OpKind.BACKWARD, "writes", "dhidden"): (
        "reads it too, so it is behind HEAD and the next HEAD behind it; between BACKWARDs the "
        "lane is in order"
    ),
    (OpKind.BACKWARD, "reads", "weights"): (
        "the one writer is UPDATE(b). The next one is behind DRAIN(b), which is behind all "
        "BACKWARD(b,m) by the gradient slot; the last one is before FORWARD(b,m), which is before "
        "BACKWARD(b,m) by the tape or, for the embedding, by hidden and dhidden"
    ),
    **dict.fromkeys(
        [
            *((OpKind.MOMENTUM, "reads", at) for at in ("grad", "host_grad", "master")),
            (OpKind.MOMENTUM, "reads", "tier_slot"),
            *((OpKind.ORTHOGONALIZE, "reads", at) for at in ("grad", "host_grad", "grad_slot")),
            (OpKind.COLLECT, "reads", "grad_slot"),
        ],
        "writes it too",
    ),
    (OpKind.COLLECT, "writes", "grad_slot"): (
        "reads it too, and ORTHOGONALIZE, which is next, writes it"
    ),
    (OpKind.MOMENTUM, "reads", "norm"): "writes the gradient that NORM reads, and so comes behind",
    (OpKind.MOMENTUM, "writes", "master"): (
        "reads it too; UPDATE(b), which writes it next, is behind by the directions"
    ),
    (OpKind.MOMENTUM, "writes", "tier_slot"): "the same, where masters are on disk",
}


def mutants() -> list[Mutant]:
    ops = [op for shape in MUTANT_SHAPES for ops in short_life(shape) for op in ops]
    return sorted(
        {
            (op.kind, side, resource[0])
            for op in ops
            for side in ("reads", "writes")
            for resource in getattr(op, side)
        }
    )


def mutated(ops: list[Op], mutant: Mutant) -> list[Op]:
    kind, side, family = mutant

    def drop(op: Op) -> Op:
        kept: dict[str, Any] = {side: tuple(res for res in getattr(op, side) if res[0] != family)}
        return replace(op, **kept) if op.kind is kind else op

    return [drop(op) for op in ops]


def is_found(mutant: Mutant) -> bool:
    for shape in MUTANT_SHAPES:
        schedules = [one_lane_per_kind(mutated(ops, mutant)) for ops in short_life(shape)]
        with suppress(ScheduleError):
            check_schedules(shape, schedules)
            continue
        return True
    return False


@pytest.mark.few(40)
@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: "-".join(map(str, mutant)))
def test_a_dropped_declaration_is_found(mutant: Mutant) -> None:
    assert is_found(mutant) == (mutant not in EQUIVALENT)


def test_equivalent_mutants_exist() -> None:
    assert EQUIVALENT.keys() <= set(mutants())


def test_a_race_is_told_by_both_sides() -> None:
    shape = MUTANT_SHAPES[0]
    ops = mutated(build_step(shape), (OpKind.FETCH, "writes", "slot"))
    with pytest.raises(ScheduleError) as caught:
        check_schedules(shape, [ops])
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
