"""Places and declarations of single ops.

That they are right as a whole: tests/testkit/test_schedule_laws.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from megatrain.errors import ScheduleError
from megatrain.features.registry import places_of
from megatrain.step.ops import Op, OpKind, SlotId
from megatrain.step.shape import StepShape
from testkit.schedules import build_step, op_of


def only(ops: Iterable[Op], kind: OpKind, block: int | None = None) -> list[Op]:
    return [op for op in ops if op.kind is kind and block in (None, op.block)]


def slots_of(family: str, shape: StepShape) -> list[SlotId | None]:
    """The slot of a thing of each block; None: it has none."""
    places = places_of(shape)
    return [places.get((family, block), ("", None))[1] for block in range(shape.num_blocks)]


def ring(ops: Iterable[Op]) -> list[SlotId]:
    """The slot of each saved input."""
    return [op.place("saved_input", op.block, op.micro)[1] for op in ops]


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_layer_has_one_slot_all_its_life(slots: int) -> None:
    ops = build_step(StepShape(num_blocks=11, slots=slots))
    used = {(op.block, op.place("fetched")[1]) for op in ops if op.touches("fetched")}
    layers = {(layer, (layer - 1) % slots) for layer in range(1, 10)}
    assert used == layers | {(0, "embedding"), (10, "head")}


def test_untied_edges_share_a_gradient_slot() -> None:
    ops = build_step(StepShape(num_blocks=4, num_micro=2))
    assert [(op.block, op.place("grad_sum")[1]) for op in only(ops, OpKind.DRAIN)] == [
        (3, "edge"),
        (2, 0),
        (1, 1),
        (0, "edge"),
    ]
    assert [op.adds for op in only(ops, OpKind.BACKWARD, 0)] == [False, True]


def test_a_tied_table_keeps_its_gradient_from_head_to_embedding() -> None:
    ops = build_step(StepShape(num_blocks=4, num_micro=2, tied=True, update="in_backward"))
    first, second = only(ops, OpKind.HEAD)
    assert ("grad_slot", "edge") in first.writes
    assert ("grad_slot", "edge") not in first.reads
    assert ("grad_slot", "edge") in second.reads
    assert all(op.adds for op in only(ops, OpKind.BACKWARD, 0))
    assert [
        (op.block, op.place("grad_sum")[1], op.place("drained_grad")[1])
        for op in only(ops, OpKind.DRAIN)
    ] == [(3, "head", "head"), (2, 0, 0), (1, 1, 1), (0, "edge", "edge")]


def test_rows_of_the_embedding_share_with_a_trained_head() -> None:
    shape = StepShape(num_blocks=4, gather_embedding=True)
    assert slots_of("grad_sum", shape) == ["edge", 1, 0, "edge"]
    frozen = StepShape(num_blocks=4, gather_embedding=True, trained=(True, True, True, False))
    assert slots_of("grad_sum", frozen) == [0, 1, 0, None]


def test_the_tape_ring_goes_round_through_forward_and_backward() -> None:
    ops = build_step(StepShape(num_blocks=4, num_micro=2, tape="host", tape_slots=3))
    assert ring(only(ops, OpKind.STASH)) == [0, 1, 2, 0]
    assert ring(only(ops, OpKind.RESTORE)) == [1, 2, 0, 1]
    assert ring(only(ops, OpKind.BACKWARD)[:4]) == [1, 2, 0, 1]


def test_backward_of_every_layer_waits_for_the_routers_of_all_layers() -> None:
    ops = build_step(StepShape(num_blocks=4, num_micro=2, balances=True))
    place = ("routing",)
    writers = [op for op in ops if place in op.writes]
    readers = [op for op in ops if place in op.reads and op not in writers]
    assert [(op.block, op.micro) for op in writers] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [str(op) for op in readers] == [
        "HEAD(3,0)",
        "BACKWARD(2,0)",
        "BACKWARD(2,1)",
        "BACKWARD(1,0)",
        "BACKWARD(1,1)",
    ]


def test_the_first_micro_batch_overwrites_and_the_others_add() -> None:
    shape = StepShape(num_blocks=4, num_micro=2)
    first, second = (op_of(shape, OpKind.BACKWARD, 1, micro) for micro in (0, 1))
    place = first.place("grad_sum")
    assert (first.adds, second.adds) == (False, True)
    assert place in first.writes
    assert place not in first.reads
    assert place in second.writes
    assert place in second.reads


def test_a_frozen_block_passes_gradients_on_and_keeps_none() -> None:
    shape = StepShape(num_blocks=5, trained=(False, True, False, True, True))
    op = op_of(shape, OpKind.BACKWARD, 2)
    assert op.writes == (("dhidden", 0),)
    with pytest.raises(ScheduleError, match=r"BACKWARD\(2,0\) declares no grad_sum"):
        op.place("grad_sum")
    assert not only(build_step(shape), OpKind.DRAIN, 2)


def test_the_lowest_trained_block_passes_nothing_on() -> None:
    shape = StepShape(num_blocks=4, trained=(False, True, True, True))
    assert op_of(shape, OpKind.BACKWARD, 2).writes == (("dhidden", 0), ("grad_slot", 0))
    assert op_of(shape, OpKind.BACKWARD, 1).writes == (("grad_slot", 1),)


def test_layers_take_turns_between_disk_and_update_and_the_edges_share_a_place() -> None:
    late = StepShape(num_blocks=6, update="late", tier="states")
    assert slots_of("optim_state", late) == ["edge", 0, 1, 0, 1, "edge"]
    early = StepShape(num_blocks=6, update="in_backward", tier="states", tier_slots=3)
    assert slots_of("optim_state", early) == ["edge", 0, 2, 1, 0, "edge"]
    frozen = StepShape(
        num_blocks=6, update="late", tier="states", trained=(False, True, False, True, True, True)
    )
    assert slots_of("optim_state", frozen) == [None, 0, None, 1, 0, "edge"]


def test_an_update_works_between_its_read_and_its_write() -> None:
    shape, place = StepShape(num_blocks=4, update="late", tier="states"), ("tier_slot", 0)
    read, update, write = (
        op_of(shape, kind, 1) for kind in (OpKind.READ, OpKind.UPDATE, OpKind.WRITE)
    )
    assert (read.reads, read.writes) == ((("master", 1),), (place,))
    assert update.reads == (("grad", 1), ("clip",), place)
    assert update.writes == (place, ("weights", 1))
    assert (write.reads, write.writes) == ((place,), (("master", 1),))


def test_an_update_reads_what_says_that_its_gradient_is_finite() -> None:
    late = op_of(StepShape(num_blocks=4, update="late"), OpKind.UPDATE, 1)
    assert late.reads == (("grad", 1), ("clip",), ("master", 1))
    early = op_of(StepShape(num_blocks=4, update="in_backward"), OpKind.UPDATE, 1)
    assert early.reads == (("host_grad", 1), ("norm", 1), ("master", 1))
