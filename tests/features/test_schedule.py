"""The laws of schedule.py: order, places, prefetch.

What ops mean is checked in tests/testkit/test_schedule_laws.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from megatrain.errors import ScheduleError
from megatrain.step.hazards import Hazards
from megatrain.step.ops import Op, OpKind
from megatrain.step.shape import StepShape, Update
from testkit.effort import require_effort
from testkit.schedules import (
    build_flush,
    build_forward,
    build_leaves,
    build_return,
    build_step,
)
from testkit.toys import compute_waited, virtual_times

COMPUTE = (OpKind.FORWARD, OpKind.HEAD, OpKind.BACKWARD)


def texts(ops: Iterable[Op], *kinds: OpKind) -> str:
    return " ".join(str(op) for op in ops if op.kind in kinds)


def only(ops: Iterable[Op], kind: OpKind, block: int | None = None) -> list[Op]:
    return [op for op in ops if op.kind is kind and block in (None, op.block)]


# The order of a step.


def test_a_step_is_layer_major() -> None:
    ops = build_step(StepShape(num_blocks=4, num_micro=2))
    assert texts(ops, *COMPUTE) == (
        "FORWARD(0,0) FORWARD(0,1) FORWARD(1,0) FORWARD(1,1) FORWARD(2,0) FORWARD(2,1) "
        "HEAD(3,0) HEAD(3,1) "
        "BACKWARD(2,0) BACKWARD(2,1) BACKWARD(1,0) BACKWARD(1,1) BACKWARD(0,0) BACKWARD(0,1)"
    )
    assert texts(ops, OpKind.DRAIN, OpKind.NORM) == (
        "DRAIN(3) NORM(3) DRAIN(2) NORM(2) DRAIN(1) NORM(1) DRAIN(0) NORM(0)"
    )


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"update": "late", "tape": "host", "tier": "states"},
        {"update": "in_backward", "tape": "host", "tier": "states"},
        {"update": "second_backward", "tape": "host"},
        {"update": "late", "divided": True, "balances": True, "num_micro": 0},
        {"update": "late", "kept_layers": 1},
    ],
    ids=str,
)
def test_two_phases_are_the_list_of_a_step_with_leaves_between(
    changes: dict[str, Any], pending: bool
) -> None:
    shape = StepShape(**{"num_blocks": 6, "num_micro": 2, **changes})
    pending = pending and shape.update == "late"
    first, second = build_leaves(shape, pending=pending), build_return(shape)
    leaves = [op for op in first if op.kind is OpKind.HEAD]
    assert [op for op in first if op not in leaves] + second == build_step(shape, pending=pending)
    assert [op.micro for op in leaves] == list(range(shape.num_micro))
    assert first[len(first) - len(leaves) :] == leaves
    assert all(op.comes_again and not op.trains and not op.touches("grad_sum") for op in leaves)


@pytest.mark.parametrize("num_micro", [1, 2, 5])
def test_traffic_does_not_grow_with_micro_batches(num_micro: int) -> None:
    """Each layer crosses twice, those in slots at the turn once, each gradient once."""
    ops = build_step(StepShape(num_blocks=10, slots=3, num_micro=num_micro))
    fetches = Counter(op.block for op in only(ops, OpKind.FETCH))
    assert fetches == {0: 1, 1: 2, 2: 2, 3: 2, 4: 2, 5: 2, 6: 1, 7: 1, 8: 1, 9: 1}
    assert Counter(op.block for op in only(ops, OpKind.DRAIN)) == dict.fromkeys(range(10), 1)


def test_updates_follow_their_norm_in_backward() -> None:
    ops = build_step(StepShape(num_blocks=4, update="in_backward"))
    assert texts(ops, OpKind.DRAIN, OpKind.NORM, OpKind.UPDATE, OpKind.CLIP) == (
        "DRAIN(3) NORM(3) UPDATE(3) DRAIN(2) NORM(2) UPDATE(2) "
        "DRAIN(1) NORM(1) UPDATE(1) DRAIN(0) NORM(0) UPDATE(0)"
    )


def test_a_norm_waits_for_its_drain_and_holds_up_no_copy() -> None:
    """The host reads a gradient while the next one is on its way."""
    cost = {OpKind.BACKWARD: 1.0, OpKind.DRAIN: 3.0, OpKind.NORM: 3.0}
    ops = build_step(StepShape(num_blocks=6, update="late"))
    times = {str(op): (start, end) for op, start, end in virtual_times([ops], cost)}
    for block in range(6):
        assert times[f"NORM({block})"][0] >= times[f"DRAIN({block})"][1]
    assert times["CLIP"][0] == times["DRAIN(5)"][0] + 6 * 3.0 + 3.0


def test_late_updates_open_the_next_step_in_forward_order() -> None:
    shape = StepShape(num_blocks=4, update="late")
    assert texts(build_step(shape), OpKind.UPDATE, OpKind.CLIP) == "CLIP"
    following = build_step(shape, pending=True)
    assert texts(following[:4], OpKind.UPDATE) == "UPDATE(0) UPDATE(1) UPDATE(2) UPDATE(3)"
    assert following[4:] == build_step(shape)
    assert build_flush(shape) == following[:4]


MATRICES = (False, True, True, True, False)
MUON = (OpKind.MOMENTUM, OpKind.SEND, OpKind.ORTHOGONALIZE, OpKind.RETURN, OpKind.UPDATE)


def test_late_matrices_are_orthogonalized_between_the_blocks_of_forward() -> None:
    shape = StepShape(num_blocks=5, num_micro=1, update="late", matrices=MATRICES)
    ops = build_step(shape, pending=True)
    assert texts(ops[: ops.index(only(ops, OpKind.HEAD)[0])], *MUON, OpKind.FORWARD) == (
        "UPDATE(0) MOMENTUM(1) SEND(1) ORTHOGONALIZE(1) MOMENTUM(2) SEND(2) ORTHOGONALIZE(2) "
        "RETURN(1) UPDATE(1) MOMENTUM(3) SEND(3) ORTHOGONALIZE(3) RETURN(2) UPDATE(2) "
        "FORWARD(0,0) FORWARD(1,0) RETURN(3) UPDATE(3) UPDATE(4) FORWARD(2,0) FORWARD(3,0)"
    )
    one_slot = StepShape(num_blocks=5, update="late", grad_slots=1, matrices=MATRICES)
    assert texts(build_flush(one_slot), OpKind.SEND, OpKind.RETURN) == (
        "SEND(1) RETURN(1) SEND(2) RETURN(2) SEND(3) RETURN(3)"
    )


def test_in_backward_matrices_are_orthogonalized_behind_the_next_layer() -> None:
    ops = build_step(StepShape(num_blocks=5, update="in_backward", matrices=MATRICES))
    kinds = (OpKind.BACKWARD, OpKind.DRAIN, OpKind.SEND, OpKind.ORTHOGONALIZE, OpKind.RETURN)
    assert texts(ops, *kinds) == (
        "DRAIN(4) BACKWARD(3,0) DRAIN(3) SEND(3) "
        "BACKWARD(2,0) ORTHOGONALIZE(3) RETURN(3) DRAIN(2) SEND(2) "
        "BACKWARD(1,0) ORTHOGONALIZE(2) RETURN(2) DRAIN(1) SEND(1) "
        "BACKWARD(0,0) ORTHOGONALIZE(1) RETURN(1) DRAIN(0)"
    )


@pytest.mark.parametrize("update", ["late", "in_backward", "second_backward"])
@pytest.mark.parametrize("num_micro", [1, 4])
def test_matrices_are_orthogonalized_once_per_step(num_micro: int, update: Update) -> None:
    shape = StepShape(num_blocks=5, num_micro=num_micro, update=update, matrices=MATRICES)
    ops = build_step(shape, pending=update == "late")
    for kind in MUON[:-1]:
        assert Counter(op.block for op in only(ops, kind)) == {1: 1, 2: 1, 3: 1}


def test_only_trained_layers_have_matrices() -> None:
    with pytest.raises(ScheduleError, match="block 0 is not a trained layer"):
        StepShape(num_blocks=4, update="late", matrices=(True, False, False, False))
    with pytest.raises(ScheduleError, match="2 flags for 4 blocks"):
        StepShape(num_blocks=4, update="late", matrices=(False, True))


@pytest.mark.parametrize("update", ["none", "in_backward"])
def test_only_late_updates_can_be_pending(update: str) -> None:
    shape = StepShape(num_blocks=4, update=update)  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=f'no update is ever pending with update="{update}"'):
        build_step(shape, pending=True)
    with pytest.raises(ScheduleError, match="no update is ever pending"):
        build_flush(shape)


DISK = (OpKind.READ, OpKind.UPDATE, OpKind.WRITE)


def test_the_disk_is_read_ahead_and_written_behind_late_updates() -> None:
    shape = StepShape(num_blocks=6, update="late", tier="states")
    assert texts(build_step(shape), *DISK, OpKind.CLIP) == "READ(0) READ(1) READ(2) CLIP"
    assert texts(build_flush(shape), *DISK) == (
        "UPDATE(0) WRITE(0) UPDATE(1) WRITE(1) READ(3) UPDATE(2) WRITE(2) READ(4) READ(5) "
        "UPDATE(3) WRITE(3) UPDATE(4) WRITE(4) UPDATE(5) WRITE(5)"
    )


def test_the_disk_is_read_during_forward_for_updates_in_backward() -> None:
    ops = build_step(StepShape(num_blocks=6, update="in_backward", tier="states"))
    assert texts(ops[:3], *DISK) == "READ(5) READ(4) READ(3)"
    assert texts(ops[3:], *DISK) == (
        "UPDATE(5) WRITE(5) UPDATE(4) WRITE(4) READ(2) UPDATE(3) WRITE(3) READ(1) READ(0) "
        "UPDATE(2) WRITE(2) UPDATE(1) WRITE(1) UPDATE(0) WRITE(0)"
    )


@pytest.mark.parametrize("update", ["in_backward", "late"])
@pytest.mark.parametrize("tier_slots", [1, 2, 3])
def test_a_ring_of_two_keeps_the_disk_busy(update: Update, tier_slots: int) -> None:
    """Behind the first reads, the disk never waits for updates that are shorter than its work."""
    shape = StepShape(num_blocks=34, update=update, tier="states", tier_slots=tier_slots)
    cost = {OpKind.READ: 2.0, OpKind.WRITE: 2.0, OpKind.UPDATE: 3.0}
    steps = (
        [build_step(shape)] if update == "in_backward" else [build_step(shape), build_flush(shape)]
    )
    times = virtual_times(steps, cost)
    disk_s = sum(end - start for op, start, end in times if op.lane == "disk")
    layers_s = 32 * 3.0
    edges_s = 2.0 + 3.0 + 2 * (3.0 + 2.0)
    waited_s = total_s(times) - disk_s
    assert (waited_s > layers_s / 2) == (tier_slots == 1)
    assert waited_s <= edges_s or tier_slots == 1


def test_an_evaluation_keeps_nothing() -> None:
    ops = build_forward(StepShape(num_blocks=4, num_micro=2, tape="host", update="late", tied=True))
    assert {op.kind for op in ops} == {OpKind.FETCH, OpKind.FORWARD, OpKind.HEAD}
    written = {resource[0] for op in ops for resource in op.writes}
    assert written == {"slot", "hidden", "loss"}


def test_ranks_gather_behind_each_fetch_and_exchange_before_each_drain() -> None:
    shape = StepShape(num_blocks=4, num_micro=2, divided=True, update="late", tied=True)
    ops = [op for op in build_step(shape) if op.lane in ("in", "comm", "out")]
    assert " ".join(map(str, ops)) == (
        "FETCH(0) GATHER(0) FETCH(1) GATHER(1) FETCH(2) GATHER(2) FETCH(3) GATHER(3) "
        "EXCHANGE(3) DRAIN(3) EXCHANGE(2) DRAIN(2) EXCHANGE(1) DRAIN(1) EXCHANGE(0) DRAIN(0)"
    )


@pytest.mark.parametrize("update", ["none", "in_backward", "late"])
@pytest.mark.parametrize("build", [build_step, build_forward])
def test_lane_comm_does_not_know_of_micro_batches(update: Update, build: Any) -> None:
    """A rank that has none gathers and exchanges with the others all the same."""
    shapes = [
        StepShape(num_blocks=7, num_micro=num, divided=True, update=update, tape="host")
        for num in range(4)
    ]
    lists = [[op for op in build(shape) if op.lane == "comm"] for shape in shapes]
    assert lists[0]
    assert all(ops == lists[0] for ops in lists)


def test_views_fetch_nothing_and_read_the_store() -> None:
    ops = build_step(StepShape(num_blocks=4, copying=False))
    assert not only(ops, OpKind.FETCH)
    assert all(("weights", op.block) in op.reads for op in ops if op.kind in COMPUTE)


def test_backward_ends_at_the_lowest_trained_block() -> None:
    trained = (False, False, True, False, True)
    ops = build_step(StepShape(num_blocks=5, tape="host", trained=trained, update="in_backward"))
    assert texts(ops, OpKind.BACKWARD) == "BACKWARD(3,0) BACKWARD(2,0)"
    assert texts(ops, OpKind.STASH) == "STASH(2,0) STASH(3,0)"
    assert texts(ops, OpKind.DRAIN, OpKind.NORM) == "DRAIN(4) NORM(4) DRAIN(2) NORM(2)"
    assert texts(ops, OpKind.UPDATE) == "UPDATE(4) UPDATE(2)"


def test_training_the_head_alone_needs_no_backward_and_no_tape() -> None:
    trained = (False, False, False, True)
    ops = build_step(StepShape(num_blocks=4, tape="host", trained=trained))
    kinds = {OpKind.FETCH, OpKind.FORWARD, OpKind.HEAD, OpKind.DRAIN, OpKind.NORM}
    assert {op.kind for op in ops} == kinds
    assert not any(("dhidden", 0) in op.writes for op in ops)


# Prefetch.


def test_an_incoming_op_stands_below_the_one_that_frees_its_place() -> None:
    ops = build_step(StepShape(num_blocks=7, num_micro=2, tape="host"))
    assert texts(ops, *COMPUTE, OpKind.FETCH, OpKind.RESTORE) == (
        "FETCH(0) FETCH(1) FETCH(2) "
        "FORWARD(0,0) FORWARD(0,1) "
        "FORWARD(1,0) FORWARD(1,1) FETCH(3) "
        "FORWARD(2,0) FORWARD(2,1) FETCH(4) "
        "FORWARD(3,0) FORWARD(3,1) FETCH(5) FETCH(6) "
        "FORWARD(4,0) FORWARD(4,1) "
        "FORWARD(5,0) FORWARD(5,1) "
        "RESTORE(5,0) RESTORE(5,1) HEAD(6,0) HEAD(6,1) "
        "BACKWARD(5,0) RESTORE(4,0) BACKWARD(5,1) RESTORE(4,1) FETCH(3) "
        "BACKWARD(4,0) RESTORE(3,0) BACKWARD(4,1) RESTORE(3,1) FETCH(2) "
        "BACKWARD(3,0) RESTORE(2,0) BACKWARD(3,1) RESTORE(2,1) FETCH(1) "
        "BACKWARD(2,0) RESTORE(1,0) BACKWARD(2,1) RESTORE(1,1) "
        "BACKWARD(1,0) BACKWARD(1,1) "
        "BACKWARD(0,0) BACKWARD(0,1)"
    )


def fetch_when_needed(ops: Sequence[Op]) -> list[Op]:
    """The same step, but each fetch stands directly above its first reader."""
    result: list[Op] = []
    waiting: list[Op] = []
    for op in ops:
        if op.kind is OpKind.FETCH:
            waiting.append(op)
            continue
        for fetch in [fetch for fetch in waiting if fetch.writes[0] in op.reads]:
            result.append(fetch)
            waiting.remove(fetch)
        result.append(op)
    return result


def places_freed(ops: Sequence[Op]) -> list[int]:
    """Return which compute op last used the place of each incoming op below the turn."""
    last_use: dict[object, int] = {}
    freed = []
    turn = next(position for position, op in enumerate(ops) if op.kind is OpKind.HEAD)
    for position, op in enumerate(ops):
        if op.lane == "compute":
            last_use.update(dict.fromkeys(op.reads + op.writes, position))
        if op.lane == "in" and position > turn:
            freed.append(last_use[op.writes[0]])
    return freed


@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("tape_slots", [2, 3])
@pytest.mark.parametrize("num_micro", [2, 4])
def test_places_are_filled_in_the_order_they_are_freed(
    slots: int, tape_slots: int, num_micro: int
) -> None:
    shape = StepShape(
        num_blocks=9,
        slots=slots,
        tape_slots=tape_slots,
        num_micro=num_micro,
        tape="host",
    )
    freed = places_freed(build_step(shape))
    assert freed == sorted(freed)
    late = places_freed(fetch_when_needed(build_step(shape)))
    assert late != sorted(late)


def total_s(times: Iterable[tuple[Op, float, float]]) -> float:
    return max(end for _, _, end in times)


def test_copies_as_long_as_compute_are_hidden_but_for_the_first_and_last() -> None:
    """A layer's fetch takes as long as its forward, its drain as long as its backward."""
    cost = {
        OpKind.FETCH: 2.0,
        OpKind.FORWARD: 1.0,
        OpKind.HEAD: 1.0,
        OpKind.BACKWARD: 3.0,
        OpKind.DRAIN: 6.0,
    }
    ops = build_step(StepShape(num_blocks=12, num_micro=2))
    compute_s = 11 * 2 * 1.0 + 2 * 1.0 + 11 * 2 * 3.0
    first_fetch_s, last_drain_s = 2.0, 6.0
    assert total_s(virtual_times([ops], cost)) == first_fetch_s + compute_s + last_drain_s
    slower = cost | {OpKind.FETCH: 2.5}
    assert total_s(virtual_times([ops], slower)) > 2.5 + compute_s + last_drain_s


def test_late_updates_hide_behind_the_next_forward() -> None:
    """The host updates a block as fast as forward uses one; only the first few are seen."""
    shape = StepShape(num_blocks=32, update="late")
    cost = {
        OpKind.FETCH: 1.0,
        OpKind.FORWARD: 2.0,
        OpKind.HEAD: 2.0,
        OpKind.BACKWARD: 6.0,
        OpKind.UPDATE: 2.0,
    }
    steps = [build_step(shape)] + [build_step(shape, pending=True)] * 3
    compute_s = 31 * 2.0 + 2.0 + 31 * 6.0
    seen_s = total_s(virtual_times(steps, cost)) - 4 * compute_s
    assert seen_s <= 4 * (2 * 2.0 + 2 * 1.0)


@pytest.mark.parametrize(("tape_slots", "stalls"), [(2, True), (3, True), (4, False)])
def test_the_ring_hides_a_fetch_that_stands_before_restores(tape_slots: int, stalls: bool) -> None:
    """R micro-batches of backward must last as long as one fetch and two restores: here 10."""
    shape = StepShape(num_blocks=12, num_micro=8, tape="host", tape_slots=tape_slots)
    cost = {
        OpKind.FETCH: 9.0,
        OpKind.FORWARD: 2.0,
        OpKind.HEAD: 3.0,
        OpKind.BACKWARD: 3.0,
        OpKind.RESTORE: 0.5,
        OpKind.STASH: 0.5,
    }
    ops = build_step(shape)
    assert (compute_waited(virtual_times([ops], cost), OpKind.BACKWARD) > 0) == stalls
    in_deadline_order = virtual_times([fetch_when_needed(ops)], cost)
    assert compute_waited(in_deadline_order, OpKind.BACKWARD) > 0


def test_a_step_of_126_blocks_and_64_micro_batches_is_built_with_little_effort() -> None:
    shape = StepShape(
        num_blocks=126, num_micro=64, tape="host", tape_slots=4, update="late", tied=True
    )

    def build() -> None:
        hazards = Hazards()
        assert len([hazards.feed(op) for op in build_step(shape, pending=True)]) > 32_000

    require_effort(build, at_most=30)
