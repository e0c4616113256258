"""A step that is left, wherever compute has come to, leaves the state of the step before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatrain.engine.engine import Engine
from megatrain.errors import StepAborted
from megatrain.step.shape import Update
from testkit.states import same, state_of, threads_end
from testkit.worlds import Case, make_batch, world_of

SORT = "llama of 2 layers"
SHAPES = ((1, 4), (2, 3))
NUM_STEPS = 3


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    with threads_end():
        yield


class Leaves:
    """Asks to leave at one call of the last step."""

    def __init__(self, at: int) -> None:
        self.at, self.is_last, self.num_calls = at, False, 0

    def __call__(self) -> bool:
        self.num_calls += self.is_last
        return self.is_last and self.num_calls >= self.at


def _case(update: Update) -> Case:
    return Case(sort=SORT, steps=(SHAPES,) * NUM_STEPS, update=update, tape="host", copying=True)


def _left_at(update: Update, at: int) -> tuple[bool, bool, int]:
    """Leave the last step; return whether it was left, the state is right, and how often asked."""
    world = world_of(SORT)
    with world.engine(_case(update), reference=True) as engine:
        for number in range(NUM_STEPS - 1):
            engine.step(make_batch(SHAPES, seed=number))
        engine.synchronize()
        before = state_of(world)
    world = world_of(SORT)
    leaves, left = Leaves(at), False
    with world.engine(_case(update)) as engine:
        engine.should_abort = leaves
        for number in range(NUM_STEPS):
            leaves.is_last = number == NUM_STEPS - 1
            try:
                engine.step(make_batch(SHAPES, seed=number))
            except StepAborted:
                left = True
                assert number == NUM_STEPS - 1
                assert engine.is_consistent
                snapshot = engine.snapshot()
                assert snapshot.num_steps == NUM_STEPS - 1
                for block in snapshot.order:
                    snapshot.wait(block)
                    snapshot.let_go(block)
        engine.synchronize()
        right = same(state_of(world), before)
    return left, right, leaves.num_calls


@pytest.mark.parametrize("update", ["late", "in_backward", "none"])
def test_a_step_is_left_where_the_state_is_whole(update: Update) -> None:
    _, _, num_calls = _left_at(update, at=1 << 30)
    found = [_left_at(update, at) for at in range(1, num_calls + 1, 2)]
    assert num_calls == 14  # both micro-batches: embedding and layers there and back, and the head
    assert all(right for left, right, _ in found if left)
    count = sum(left for left, _, _ in found)
    assert count == len(found) if update != "in_backward" else len(found) / 3 < count < len(found)


def test_a_step_that_is_left_after_an_update_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Engine, "_may_leave", lambda self: True)
    _, _, num_calls = _left_at("in_backward", at=1 << 30)
    with pytest.raises(AssertionError):
        _left_at("in_backward", at=num_calls)
