"""The order of passes: which pairs commute, and that no other order matters.

A pair is tried on shapes with these two features and no other: an order of all passes in which the
second one runs first has to give the same lists, or the pair is in MUST_PRECEDE with its reason.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from megatrain.errors import ScheduleError
from megatrain.features import registry
from megatrain.features.registry import ORDER, passes_of
from megatrain.step import schedule
from megatrain.step.ops import LANES, Op
from megatrain.step.passes import Pass
from megatrain.step.shape import StepShape
from testkit.cases import at_a_push

NAMES = [entry.name for entry in ORDER]
ON: Mapping[str, Mapping[str, Any]] = {
    "two_backward_passes": {"update": "second_backward"},
    "saved_activations": {"kept_layers": 2},
    "fetches": {},
    "expert_pages": {"pages": True},
    "embedding_rows": {"gather_embedding": True},
    "tied_embeddings": {"tied": True},
    "activation_offload": {"tape": "host"},
    "router_loss": {"balances": True},
    "muon": {"matrices": True},
    "disk_offload": {"tier": "states"},
    "sharding": {"divided": True},
    "unified_memory": {"copying": False},
}
"""What of a shape turns each feature on."""
AMONG_RANKS = {("activation_offload", "router_loss")}
"""Pairs that meet where there are ranks alone."""
MUST_PRECEDE = {
    ("two_backward_passes", "fetches"): "both backwards are fetched for",
    ("two_backward_passes", "activation_offload"): "both backwards are restored for",
    ("two_backward_passes", "disk_offload"): "an update is copied with what is put around it",
    ("saved_activations", "activation_offload"): "a layer that keeps all has no input to move",
    ("embedding_rows", "tied_embeddings"): "a table that the head reads has one place for both",
    ("fetches", "muon"): "late updates are put before fetches",
    ("fetches", "sharding"): "a GATHER is put behind a fetch",
    ("fetches", "unified_memory"): "fetches are dropped",
    ("tied_embeddings", "unified_memory"): "sums of all ops are looked at",
    ("muon", "disk_offload"): "updates move, and with them what is read and written around them",
    ("muon", "sharding"): "a COLLECT is put behind a SEND",
    ("muon", "unified_memory"): "SEND and RETURN are dropped",
}
SERIAL_ORDER = {
    ("activation_offload", "router_loss"): "both put ops where backward starts",
    ("fetches", "disk_offload"): "both put ops where a step starts",
}
"""Pairs of which another order gives other lists, but the same to each lane."""


def shapes_of(*names: str) -> Iterator[StepShape]:
    """Yield shapes that have these features alone."""
    changes: dict[str, Any] = {"divided": True} if names in AMONG_RANKS else {}
    for name in names:
        changes |= ON[name]
    updates = [changes.pop("update", None)] if "update" in changes else ["late", "in_backward"]
    has_matrices = changes.pop("matrices", False)
    for update, num_micro, grad_slots, frozen in itertools.product(
        updates, (1, 2), (1, 2), (None, 5)
    ):
        trained = tuple(block != frozen for block in range(6))
        matrices = tuple(bool(has_matrices) and 0 < block < 5 for block in range(6))
        yield StepShape(
            num_blocks=6,
            num_micro=num_micro - 1 if changes.get("divided") else num_micro,
            grad_slots=grad_slots,
            update=update,
            trained=trained,
            matrices=matrices,
            **changes,
        )


def lists(shape: StepShape, passes: Sequence[Pass]) -> list[list[Op]]:
    kinds = ["forward", "pending step" if shape.update == "late" else "step"]
    return [schedule.build_ops(kind, shape, passes) for kind in kinds]


def of_lanes(found: list[list[Op]]) -> list[list[Op]]:
    return [[op for op in ops if op.lane == lane] for ops in found for lane in LANES]


def declared(found: list[list[Op]]) -> list[list[Any]]:
    """Lists without the order in which an op names what it touches."""
    return [[(str(op), op.adds, {*op.reads}, {*op.writes}) for op in ops] for ops in found]


def verdict(shape: StepShape, order: Sequence[Pass], expected: list[list[Op]]) -> str:
    """Say what another order of passes changes."""
    try:
        found = lists(shape, order)
    except (KeyError, ScheduleError):
        return "other lists"
    if declared(of_lanes(found)) != declared(of_lanes(expected)):
        return "other lists"
    return "" if declared(found) == declared(expected) else "other serial order"


def orders_with(first: str, second: str, shape: StepShape) -> Iterator[list[Pass]]:
    """Yield the orders in which the second one runs before the first."""
    names = [entry.name for entry in ORDER if entry.is_on(shape)]
    by_name = dict(zip(names, passes_of(shape), strict=True))
    for order in itertools.permutations(names):
        if order.index(second) < order.index(first):
            yield [by_name[name] for name in order]


def pairs() -> list[tuple[str, str]]:
    """Return the pairs that a shape can have."""
    found = []
    for pair in itertools.combinations(NAMES, 2):
        try:
            next(shapes_of(*pair))
        except ScheduleError:
            continue
        found.append(pair)
    return found


def what_the_order_decides(pair: tuple[str, str]) -> str:
    worst = ""
    for shape in shapes_of(*pair):
        expected, best = lists(shape, passes_of(shape)), "other lists"
        for order in orders_with(*pair, shape):
            found = verdict(shape, order, expected)
            if found != "other lists":
                best = found
            if not found:
                break
        if best == "other lists":
            return best
        worst = best or worst
    return worst


def follows(pair: tuple[str, str]) -> bool:
    """Return whether the order of a pair follows from those of two others."""
    return any(a == pair[0] and (b, pair[1]) in MUST_PRECEDE for a, b in MUST_PRECEDE)


@pytest.mark.parametrize("pair", pairs(), ids="-".join)
def test_pairs_that_do_not_commute_are_known(pair: tuple[str, str]) -> None:
    expected = "other serial order" if pair in SERIAL_ORDER else ""
    if pair in MUST_PRECEDE:
        expected = "other lists"
    assert what_the_order_decides(pair) == expected or follows(pair)


def test_the_order_is_that_of_all_pairs() -> None:
    assert set(ON) == set(NAMES)
    known = {*MUST_PRECEDE, *SERIAL_ORDER}
    assert known <= set(pairs())
    assert all(NAMES.index(first) < NAMES.index(second) for first, second in known)


def another_order(shape: StepShape, draw: random.Random) -> list[Pass]:
    """Return the passes of a shape in an order that keeps what is known of pairs."""
    waiting = [entry.name for entry in ORDER if entry.is_on(shape)]
    by_name = dict(zip(waiting, passes_of(shape), strict=True))
    order = []
    while waiting:
        behind = {b for a, b in (*MUST_PRECEDE, *SERIAL_ORDER) if a in waiting}
        chosen = draw.choice([name for name in waiting if name not in behind])
        waiting.remove(chosen)
        order.append(by_name[chosen])
    return order


@pytest.mark.parametrize("seed", at_a_push(range(200), 10))
def test_any_order_that_keeps_these_pairs_gives_the_same_lists(seed: int) -> None:
    draw = random.Random(seed)
    while True:
        names = draw.sample(NAMES, draw.randint(3, 7))
        try:
            shape = draw.choice(list(shapes_of(*names)))
        except ScheduleError:
            continue
        break
    expected = lists(shape, passes_of(shape))
    assert verdict(shape, another_order(shape, draw), expected) == ""


def test_a_plain_step_has_no_feature() -> None:
    shape = StepShape(num_blocks=4, update="late")
    assert registry.features_of(shape) == []
    assert [type(one).__name__ for one in passes_of(shape)] == ["Fetches"]
