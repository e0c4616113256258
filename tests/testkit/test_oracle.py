"""The second opinion on ops: what they touch, and a memory whose facts are used up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.features.registry import ORDER, passes_of
from megatrain.step.ops import Op
from megatrain.step.shape import StepShape
from testkit.oracle import Meaning
from testkit.toys import short_life

MATRICES = (False, True, True, True, False)
SHAPES = [
    StepShape(num_blocks=5, num_micro=2, tape="host", update="late", tied=True),
    StepShape(num_blocks=5, num_micro=2, update="in_backward"),
    StepShape(num_blocks=5, copying=False, trained=(False, True, False, True, False)),
    StepShape(num_blocks=5, trained=(False, False, False, False, True), update="late", tied=True),
    StepShape(num_blocks=6, update="in_backward", tier="states"),
    StepShape(num_blocks=6, update="late", tier="states", trained=(True, False, *[True] * 4)),
    StepShape(num_blocks=6, num_micro=2, update="late", tier="states", tied=True),
    StepShape(num_blocks=5, num_micro=2, update="second_backward", tape="host"),
    StepShape(num_blocks=6, num_micro=2, update="late", kept_layers=2, pages=True, balances=True),
    StepShape(num_blocks=5, update="in_backward", gather_embedding=True),
    StepShape(num_blocks=5, num_micro=2, update="in_backward", copying=False, tied=True),
    StepShape(num_blocks=5, num_micro=2, update="late", divided=True, balances=True),
    StepShape(num_blocks=5, update="late", tier="states", matrices=MATRICES),
    StepShape(num_blocks=5, update="in_backward", matrices=MATRICES, divided=True),
    StepShape(num_blocks=5, update="second_backward", matrices=MATRICES, copying=False),
]
"""Every feature is in one of them, and every declaration of its ops."""


def test_the_shapes_have_all_features() -> None:
    found = {type(one).__name__ for shape in SHAPES for one in passes_of(shape)}
    assert len(found) == len(ORDER)


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
