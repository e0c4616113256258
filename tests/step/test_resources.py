"""Places and declarations of single ops. That they are right as a whole: test_checks.py."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from megatrain.step.ops import Op, OpKind
from megatrain.step.places import block_places
from megatrain.step.resources import OpTable
from megatrain.step.schedule import build_step
from megatrain.step.shape import StepShape


def only(ops: Iterable[Op], kind: OpKind, block: int | None = None) -> list[Op]:
    return [op for op in ops if op.kind is kind and block in (None, op.block)]


@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_layer_has_one_slot_all_its_life(slots: int) -> None:
    ops = build_step(StepShape(num_blocks=11, slots=slots))
    used = {(op.block, op.slot) for op in ops if op.slot is not None}
    layers = {(layer, (layer - 1) % slots) for layer in range(1, 10)}
    assert used == layers | {(0, "embedding"), (10, "head")}


def test_untied_edges_share_a_gradient_slot() -> None:
    ops = build_step(StepShape(num_blocks=4, num_micro=2))
    assert [(op.block, op.grad_slot) for op in only(ops, OpKind.DRAIN)] == [
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
    assert [(op.block, op.grad_slot, op.host_grad) for op in only(ops, OpKind.DRAIN)] == [
        (3, "head", "head"),
        (2, 0, 0),
        (1, 1, 1),
        (0, "edge", "edge"),
    ]


def test_rows_of_the_embedding_share_with_a_trained_head() -> None:
    shape = StepShape(num_blocks=4, gather_embedding=True)
    assert [places.grad_slot for places in block_places(shape)] == ["edge", 1, 0, "edge"]
    frozen = StepShape(num_blocks=4, gather_embedding=True, trained=(True, True, True, False))
    assert [places.grad_slot for places in block_places(frozen)] == [0, 1, 0, None]


def test_the_tape_ring_goes_round_through_forward_and_backward() -> None:
    ops = build_step(StepShape(num_blocks=4, num_micro=2, tape="host", tape_slots=3))
    assert [op.tape_slot for op in only(ops, OpKind.STASH)] == [0, 1, 2, 0]
    assert [op.tape_slot for op in only(ops, OpKind.RESTORE)] == [1, 2, 0, 1]
    assert [op.tape_slot for op in only(ops, OpKind.BACKWARD)] == [1, 2, 0, 1, None, None]


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
    table = OpTable(StepShape(num_blocks=4, num_micro=2))
    first, second = table.backward(1, 0), table.backward(1, 1)
    place = ("grad_slot", first.grad_slot)
    assert (first.adds, second.adds) == (False, True)
    assert place in first.writes
    assert place not in first.reads
    assert place in second.writes
    assert place in second.reads


def test_a_frozen_block_passes_gradients_on_and_keeps_none() -> None:
    table = OpTable(StepShape(num_blocks=5, trained=(False, True, False, True, True)))
    op = table.backward(2, 0)
    assert op.grad_slot is None
    assert op.writes == (("dhidden", 0),)
    with pytest.raises(AssertionError, match="block 2 is frozen"):
        table.drain(2)


def test_the_lowest_trained_block_passes_nothing_on() -> None:
    table = OpTable(StepShape(num_blocks=4, trained=(False, True, True, True)))
    assert table.backward(2, 0).writes == (("dhidden", 0), ("grad_slot", 0))
    assert table.backward(1, 0).writes == (("grad_slot", 1),)


def test_layers_take_turns_between_disk_and_update_and_the_edges_share_a_place() -> None:
    late = StepShape(num_blocks=6, update="late", tier="states")
    assert [p.tier_slot for p in block_places(late)] == ["edge", 0, 1, 0, 1, "edge"]
    early = StepShape(num_blocks=6, update="in_backward", tier="states", tier_slots=3)
    assert [p.tier_slot for p in block_places(early)] == ["edge", 0, 2, 1, 0, "edge"]
    frozen = StepShape(
        num_blocks=6, update="late", tier="states", trained=(False, True, False, True, True, True)
    )
    assert [p.tier_slot for p in block_places(frozen)] == [None, 0, None, 1, 0, "edge"]


def test_an_update_works_between_its_read_and_its_write() -> None:
    table = OpTable(StepShape(num_blocks=4, update="late", tier="states"))
    place = ("tier_slot", 0)
    assert (table.read(1).reads, table.read(1).writes) == ((("master", 1),), (place,))
    assert table.update(1).reads == (("grad", 1), ("clip",), place)
    assert table.update(1).writes == (place, ("weights", 1))
    assert (table.write(1).reads, table.write(1).writes) == ((place,), (("master", 1),))


def test_an_update_reads_what_says_that_its_gradient_is_finite() -> None:
    late = OpTable(StepShape(num_blocks=4, update="late")).update(1)
    assert late.reads == (("grad", 1), ("clip",), ("master", 1))
    early = OpTable(StepShape(num_blocks=4, update="in_backward")).update(1)
    assert early.reads == (("host_grad", 1), ("norm", 1), ("master", 1))
