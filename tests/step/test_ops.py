"""Ops and resources speak for themselves in errors and traces."""

from __future__ import annotations

import pytest

from megatrain.step.ops import LANE_OF, LANES, Op, OpKind, Resource, resource_text


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (Op(kind=OpKind.CLIP), "CLIP"),
        (Op(kind=OpKind.FETCH, block=3), "FETCH(3)"),
        (Op(kind=OpKind.BACKWARD, block=0, micro=0), "BACKWARD(0,0)"),
    ],
)
def test_an_op_says_what_it_is(op: Op, text: str) -> None:
    assert str(op) == text


@pytest.mark.parametrize(
    ("resource", "text"),
    [(("clip",), "clip"), (("slot", "head"), "slot[head]"), (("tape", 3, 1), "tape[3,1]")],
)
def test_a_resource_says_what_it_is(resource: Resource, text: str) -> None:
    assert resource_text(resource) == text


def test_an_op_goes_to_the_lane_of_its_kind_unless_told() -> None:
    assert all(Op(kind=kind).lane == LANE_OF[kind] for kind in OpKind)
    assert Op(kind=OpKind.FETCH, lane="disk").lane == "disk"
    assert LANES == ("in", "compute", "out", "host")
