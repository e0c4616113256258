"""What the tests of the engine share: steps of unequal micro-batches, and states to compare."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatrain.memory.kinds import TensorKind
from megatrain.optim.states import M, V
from testkit.worlds import Case, Shapes, World, make_batch, world_of

MICRO_BATCHES: Shapes = ((1, 4), (2, 3), (1, 6), (1, 3))
State = dict[str, Tensor]


def steps_of(num_micro: int) -> tuple[Shapes, ...]:
    """Three steps of unequal micro-batches, in a new order each."""
    chosen = MICRO_BATCHES[:num_micro]
    return tuple(chosen[turn:] + chosen[:turn] for turn in (0, 1 % num_micro, 2 % num_micro))


LATE = Case(sort="llama of 2 layers", steps=steps_of(2), update="late")


def state_of(world: World) -> State:
    """Copies of all weights, remainders and moments."""
    return world.bytes_of(TensorKind.HI, TensorKind.LO, M, V)


def same(first: State, second: State) -> bool:
    return all(torch.equal(part, second[name]) for name, part in first.items())


@functools.cache
def state_after(case: Case, num_steps: int) -> State:
    """The textbook state: by the reference, settled after each step."""
    world = world_of(case.sort)
    with world.engine(case, reference=True) as engine:
        for number in range(num_steps):
            engine.step(make_batch(case.steps[number], seed=number))
            engine.synchronize()
        return state_of(world)


@contextmanager
def threads_end() -> Iterator[None]:
    """Nothing that is begun inside may be left running.

    The threads of a scratch file belong to its store, which outlives an engine.
    """
    before = set(threading.enumerate())
    yield
    begun = set(threading.enumerate()) - before
    assert {thread.name for thread in begun if not thread.name.startswith("tier_")} == set()
