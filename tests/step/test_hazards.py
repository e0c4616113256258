"""The laws of hazards.py, on random ops: order, at most one wait per lane, no wait twice."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.step.hazards import Hazards, Ticket
from megatrain.step.ops import Op, OpKind

RESOURCES = [("a",), ("b",), ("c",)]
LANES = ["in", "compute", "out"]
Fed = list[tuple[Ticket, list[Ticket]]]

touched = st.lists(st.sampled_from(RESOURCES), max_size=2, unique=True).map(tuple)
random_ops = st.lists(
    st.builds(
        Op, kind=st.just(OpKind.FETCH), lane=st.sampled_from(LANES), reads=touched, writes=touched
    ),
    max_size=20,
)


def op(lane: str, *, reads: str = "", writes: str = "") -> Op:
    return Op(
        kind=OpKind.FETCH,
        lane=lane,
        reads=tuple((name,) for name in reads),
        writes=tuple((name,) for name in writes),
    )


def feed(ops: list[Op], hazards: Hazards | None = None) -> Fed:
    hazards = hazards or Hazards()
    return [hazards.feed(op) for op in ops]


def ancestors(fed: Fed) -> dict[Ticket, set[Ticket]]:
    """Return all that is before each ticket, by lane order and waits, the slow and sure way."""
    before: dict[Ticket, set[Ticket]] = {}
    last_of_lane: dict[str, Ticket] = {}
    for ticket, waits in fed:
        direct = [*waits, *([last_of_lane[ticket.lane]] if ticket.lane in last_of_lane else [])]
        before[ticket] = set(direct).union(*(before[other] for other in direct))
        last_of_lane[ticket.lane] = ticket
    return before


def conflict(first: Op, second: Op) -> bool:
    return bool(
        set(first.writes) & {*second.reads, *second.writes} or set(first.reads) & set(second.writes)
    )


def unordered(fed: Fed) -> list[tuple[Op, Op]]:
    before = ancestors(fed)
    return [
        (first.op, second.op)
        for (first, _), (second, _) in combinations(fed, 2)
        if conflict(first.op, second.op) and first not in before[second]
    ]


@settings(max_examples=150, derandomize=True)
@given(random_ops)
def test_conflicting_ops_are_ordered_as_fed(ops: list[Op]) -> None:
    assert not unordered(feed(ops))


@settings(max_examples=150, derandomize=True)
@given(random_ops)
def test_an_op_waits_for_one_op_per_other_lane_and_never_twice(ops: list[Op]) -> None:
    waited: dict[tuple[str, str], int] = {}
    for ticket, waits in feed(ops):
        lanes = [other.lane for other in waits]
        assert len(set(lanes)) == len(lanes)
        assert ticket.lane not in lanes
        for other in waits:
            assert other.number > waited.get((ticket.lane, other.lane), -1)
            waited[ticket.lane, other.lane] = other.number


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (op("in", writes="a"), op("compute", reads="a"), True),  # read after write
        (op("in", reads="a"), op("compute", writes="a"), True),  # write after read
        (op("in", writes="a"), op("compute", writes="a"), True),  # write after write
        (op("in", reads="a"), op("compute", reads="a"), False),
        (op("in", writes="a"), op("compute", reads="b"), False),
        (op("in", writes="a"), op("in", reads="a"), False),  # lane order is enough
    ],
)
def test_the_three_hazards_and_their_neighbors(first: Op, second: Op, waits: bool) -> None:
    (ticket, _), (_, found) = feed([first, second])
    assert found == ([ticket] if waits else [])


def test_a_writer_waits_for_the_readers_of_every_lane() -> None:
    fed = feed([op("in", reads="a"), op("out", reads="a"), op("compute", writes="a")])
    assert fed[2][1] == [fed[0][0], fed[1][0]]


def test_only_the_latest_op_of_a_lane_is_waited_for() -> None:
    fed = feed([op("in", writes="a"), op("in", writes="b"), op("compute", reads="ab")])
    assert fed[2][1] == [fed[1][0]]


def test_hazards_reach_into_the_next_step() -> None:
    hazards = Hazards()
    (first, _), _ = feed([op("host", writes="a"), op("host", writes="b")], hazards)
    ((ticket, waits),) = feed([op("in", reads="a")], hazards)
    assert (waits, ticket.number) == ([first], 0)


class ForgetsReaders(Hazards):
    def _conflicts(self, op: Op) -> list[Ticket]:
        return [self._writer[resource] for resource in op.reads if resource in self._writer]


def test_a_forgotten_hazard_would_be_noticed() -> None:
    ops = [op("in", reads="a"), op("compute", writes="a")]
    assert unordered(feed(ops, ForgetsReaders())) == [(ops[0], ops[1])]
