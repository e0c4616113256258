"""Ops and resources speak for themselves in errors and traces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import megatrain
from megatrain.step.ops import (
    LANES,
    LIMITS,
    PARTS,
    SPECS,
    Op,
    OpKind,
    Resource,
)
from testkit.oracle import resource_text


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
    assert all(Op(kind=kind).lane == SPECS[kind].lane for kind in OpKind)
    assert Op(kind=OpKind.FETCH, lane="other").lane == "other"
    assert LANES == ("in", "comm", "compute", "out", "host", "disk")


@pytest.mark.parametrize("kind", OpKind)
def test_a_kind_of_op_is_described_in_one_place(kind: OpKind) -> None:
    spec = kind.spec
    assert (spec.lane in LANES, spec.limit in LIMITS, spec.part in PARTS) == (True, True, True)


def test_only_updates_and_their_disk_may_end_after_their_step() -> None:
    behind = [kind for kind in OpKind if not kind.spec.ends_step]
    directions = [OpKind.SEND, OpKind.COLLECT, OpKind.ORTHOGONALIZE, OpKind.RETURN]
    updates = [OpKind.MOMENTUM, *directions, OpKind.UPDATE]
    assert behind == [*updates, OpKind.READ, OpKind.WRITE]


TABLES_OF_KINDS = {"step/ops.py", "planning/costs.py"}
"""With the folder of its feature: the files that a new kind of op touches."""


def _lists_kinds(source: str) -> bool:
    return len(set(re.findall(r"\bOpKind\.([A-Z]+)", source))) > len(OpKind) - 3


def test_a_new_kind_of_op_touches_three_files() -> None:
    folder = Path(megatrain.__file__).parent
    found = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if _lists_kinds(path.read_text())
    }
    assert found == TABLES_OF_KINDS
