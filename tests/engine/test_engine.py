"""Laws of engine.py: lanes give the bits of the reference, and weights are there when promised.

What a step computes is in test_engine_results.py, its updates in test_engine_updates.py, its memory
in test_engine_memory.py, its failures in test_engine_failures.py. The same cases by the ten
thousand: python -m proofs.interleavings.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product

import pytest

from megatrain.lanes.lane import Lane
from megatrain.step.hazards import Hazards
from megatrain.step.ops import LANES, Op, OpKind
from megatrain.step.shape import Update
from proofs.interleavings import case_of, faults_of
from testkit.cases import at_a_push
from testkit.slow_lane import SlowLane
from testkit.states import LATE, same, state_after, state_of, steps_of, threads_end
from testkit.worlds import SORTS, Case, Outcome, make_batch, world_of


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    with threads_end():
        yield


# Law 1: lanes give the bits of the reference, whatever their timing.

Group = tuple[str, Update, str, bool]
UPDATES: tuple[Update, ...] = ("none", "in_backward", "late")


def grid() -> dict[Group, list[Case]]:
    groups: dict[Group, list[Case]] = {}
    sorts = ("llama of 2 layers", "gemma, tied", "mixtral")
    for sort, update, tape, copying in product(sorts, UPDATES, ("device", "host"), (True, False)):
        counts = (2, 3, 4) if copying else (2,)  # views need none
        groups[sort, update, tape, copying] = [
            Case(
                sort=sort,
                steps=steps_of(num_micro),
                update=update,
                tape=tape,  # type: ignore[arg-type]
                copying=copying,
                slots=slots,
                grad_slots=1 + (slots + num_micro) % 2,
                tape_slots=slots,
                kept_layers=(slots + num_micro) % 3,
                timing=hash((slots, num_micro)),
            )
            for slots, num_micro in product(counts, (1, 2, 3, 4))
        ]
    return groups


GRID = grid()
RANDOM = range(40)
PARTS = 3
"""Of a group. Each part has every number of slots and every number of micro-batches."""


@functools.cache
def expected(sort: str, update: Update, num_micro: int) -> Outcome:
    """What the reference gives: the same wherever things are kept (see below)."""
    case = Case(sort=sort, steps=steps_of(num_micro), update=update, copying=False)
    return world_of(sort).play(case, reference=True)


@pytest.mark.few(3)
@pytest.mark.parametrize("part", at_a_push(range(PARTS), 1))
@pytest.mark.parametrize("group", GRID, ids=str)
def test_lanes_give_the_bits_of_the_reference(group: Group, part: int) -> None:
    for case in GRID[group][part::PARTS]:
        reference = expected(case.sort, case.update, len(case.steps[0]))
        assert world_of(case.sort).play(case).differences(reference) == [], case


@pytest.mark.merge
@pytest.mark.parametrize("first", RANDOM[::5])
def test_random_cases_give_the_bits_of_the_reference(first: int) -> None:
    """Changing numbers of micro-batches, evaluations between, frozen parts, dropout."""
    for number in RANDOM[first : first + 5]:
        assert faults_of(number) == [], case_of(number)


@pytest.mark.few(2)
@pytest.mark.parametrize("update", UPDATES)
def test_the_reference_gives_the_same_wherever_things_are_kept(update: Update) -> None:
    for group in GRID:
        if group[:2] == ("gemma, tied", update):
            case = GRID[group][-1]
            found = world_of(case.sort).play(case, reference=True)
            assert found.differences(expected(case.sort, update, 4)) == []


def slow_lanes(*slow: str, seconds: float = 1e-2) -> list[Lane]:
    return [SlowLane(name, delay=(lambda op: seconds) if name in slow else None) for name in LANES]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("kind", "slow", "update"),
    [
        (OpKind.FETCH, "host", "late"),
        (OpKind.FORWARD, "in", "late"),
        (OpKind.STASH, "compute", "late"),
        (OpKind.HEAD, "in", "late"),
        (OpKind.RESTORE, "out", "late"),
        (OpKind.BACKWARD, "in", "late"),
        (OpKind.DRAIN, "compute", "late"),
        (OpKind.NORM, "out", "late"),
        (OpKind.NORM, "out", "in_backward"),
    ],
)
def test_ops_of_a_kind_that_do_not_wait_would_be_noticed(
    kind: OpKind, slow: str, update: Update, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(sort="gemma, tied", steps=steps_of(2), update=update, tape="host", copying=True)
    reference = expected(case.sort, update, 2)
    assert world_of(case.sort).play(case, lanes=slow_lanes(slow)).differences(reference) == []

    feed = Hazards.feed

    def forgetful(self: Hazards, op: Op):  # type: ignore[no-untyped-def]
        ticket, waits = feed(self, op)
        return ticket, [] if op.kind is kind else waits

    monkeypatch.setattr(Hazards, "feed", forgetful)
    for seconds in (1e-2, 5e-2, 0.25):  # on a busy machine the other lanes are slow too
        try:
            found = world_of(case.sort).play(case, lanes=slow_lanes(slow, seconds=seconds))
        except Exception:  # something was not there yet
            return
        if found.differences(reference):
            return
    pytest.fail("not noticed")


# Law 3: late updates are finished before anyone reads weights.


@pytest.mark.parametrize("finish", ["synchronize", "evaluate", "close"])
def test_settle_evaluate_and_close_finish_late_updates(finish: str) -> None:
    world = world_of(LATE.sort)
    engine = world.engine(LATE, lanes=slow_lanes("host"))
    with engine:
        for number in range(2):
            batch = make_batch(LATE.steps[number], seed=number)
            engine.step(batch)
        if finish != "close":
            engine.synchronize() if finish == "synchronize" else engine.evaluate(batch)
            assert same(state_of(world), state_after(LATE, 2))
    assert same(state_of(world), state_after(LATE, 2))
    engine.close()


def test_settling_twice_or_before_any_step_changes_nothing() -> None:
    world = world_of(LATE.sort)
    with world.engine(LATE) as engine:
        engine.synchronize()
        engine.step(make_batch(LATE.steps[0], seed=0))
        engine.synchronize()
        engine.synchronize()
        assert same(state_of(world), state_after(LATE, 1))


@pytest.mark.few(6)
@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("update", ["in_backward", "late"])
def test_evaluations_between_steps_change_nothing(sort: str, update: Update) -> None:
    case = Case(sort=sort, steps=steps_of(2), update=update, tape="host")
    between = Case(sort=sort, steps=steps_of(2), update=update, tape="host", evaluates_after=(0, 1))
    with_evaluations = world_of(sort).play(between)
    without = world_of(sort).play(case, reference=True)
    without.numbers = with_evaluations.numbers
    assert with_evaluations.differences(without) == []
