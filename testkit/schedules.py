"""Lists of a step with all features of its shape, single ops of them, and ops that lose waits."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

import pytest

from megatrain.features.registry import build_ops
from megatrain.step.hazards import Hazards, Ticket
from megatrain.step.ops import Op, OpKind
from megatrain.step.shape import StepShape


def build_step(shape: StepShape, *, pending: bool = False) -> list[Op]:
    """Return one training step; `pending`: with the updates that the last step left to this one."""
    return build_ops("pending step" if pending else "step", shape)


def build_leaves(shape: StepShape, *, pending: bool = False) -> list[Op]:
    return build_ops("pending leaves" if pending else "leaves", shape)


def build_return(shape: StepShape) -> list[Op]:
    return build_ops("return", shape)


def build_flush(shape: StepShape) -> list[Op]:
    return build_ops("flush", shape)


def build_forward(shape: StepShape) -> list[Op]:
    return build_ops("forward", shape)


def op_of(shape: StepShape, kind: OpKind, block: int | None = None, micro: int | None = None) -> Op:
    """Return the first op of a kind in a step, or in the updates that it leaves."""
    ops = build_step(shape, pending=shape.update == "late")
    where = {"block": block, "micro": micro}
    wanted = {name: number for name, number in where.items() if number is not None}
    return next(
        op
        for op in ops
        if op.kind is kind and all(getattr(op, name) == n for name, n in wanted.items())
    )


def without(op: Op, *, reads: Container[str | int] = (), writes: Container[str | int] = ()) -> Op:
    """Return an op that does not declare places of these families."""
    return replace(
        op,
        reads=tuple(place for place in op.reads if place[0] not in reads),
        writes=tuple(place for place in op.writes if place[0] not in writes),
    )


def lose_waits(
    patch: pytest.MonkeyPatch,
    kind: OpKind,
    *,
    reads: Container[str | int] = (),
    writes: Container[str | int] = (),
) -> None:
    """Let waits be those of ops of a kind that do not declare places of these families.

    Their actions still find all that they touch.
    """
    feed = Hazards.feed

    def feed_less(self: Hazards, op: Op) -> tuple[Ticket, list[Ticket]]:
        if op.kind is not kind:
            return feed(self, op)
        ticket, waits = feed(self, without(op, reads=reads, writes=writes))
        ticket.op = op
        return ticket, waits

    patch.setattr(Hazards, "feed", feed_less)
