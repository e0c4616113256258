"""The second opinion on ops: what they touch, and a memory whose facts are used up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.step.ops import Op
from megatrain.step.shape import StepShape
from testkit.oracle import Meaning
from testkit.toys import short_life

SHAPES = [
    StepShape(num_blocks=5, num_micro=2, tape="host", update="late", tied=True),
    StepShape(num_blocks=5, num_micro=2, update="in_backward"),
    StepShape(num_blocks=5, copying=False, trained=(False, True, False, True, False)),
    StepShape(num_blocks=5, trained=(False, False, False, False, True), update="late", tied=True),
    StepShape(num_blocks=6, update="in_backward", tier="states"),
    StepShape(num_blocks=6, update="late", tier="states", trained=(True, False, *[True] * 4)),
    StepShape(num_blocks=6, num_micro=2, update="late", tier="states", tied=True),
]


def misdeclared(shape: StepShape, schedules: list[list[Op]]) -> list[Op]:
    """Return the ops that declare more, or less, than they touch."""
    meaning, found = Meaning(shape), []
    for ops in schedules:
        meaning.begin(ops)
        for op in ops:
            reads, writes = meaning.play(op)
            if set(op.reads) != set(reads) or set(op.writes) != set(writes):
                found.append(op)
        meaning.end(ops)
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_ops_declare_what_they_touch_and_no_more(shape: StepShape) -> None:
    assert misdeclared(shape, short_life(shape)) == []


def test_a_declaration_too_many_or_too_few_would_be_noticed() -> None:
    first, *rest = short_life(SHAPES[0])
    more = replace(first[0], reads=(*first[0].reads, ("clip",)))
    less = replace(first[1], writes=())
    edited = [[more, less, *first[2:]], *rest]
    assert misdeclared(SHAPES[0], edited) == [more, less]
