"""A step as a list of ops: a pure function of its shape.

    forward    FETCH(b)   FORWARD(b,m) for each m, each with STASH(b,m) if the tape is on the host
                          and the layer's activations do not stay on the device
    head                  HEAD(m) for each m: loss, its gradient, the head's own gradient
    backward   FETCH(b)   RESTORE(b,m)   BACKWARD(b,m) for each m, then DRAIN(b) and NORM(b)
    ranks      GATHER(b)  behind each FETCH(b): the parts of the other ranks
               EXCHANGE(b) before each DRAIN(b): their gradients for our part, added up
               BALANCE    before the first HEAD, where experts are balanced
    update     UPDATE(b)  behind NORM(b), or after CLIP, on top of the next step's list in the
                          order in which its forward needs the blocks
    matrices   MOMENTUM(b) SEND(b) COLLECT(b) ORTHOGONALIZE(b) RETURN(b) of a layer before its
                          UPDATE(b), if its matrices are orthogonalized; those of the next layer to
                          be updated begin before, so that lanes overlap. Late ones are between the
                          blocks of forward, each before the fetch of its layer
    second     head and backward once more behind CLIP, each block with its UPDATE(b): the first
    backward   backward gave the norms alone, so no gradient waits
    disk       READ(b)    as early as the ring has room, in the order of updates: on top of a step
                          whose updates run in backward, at its end if they are late
               WRITE(b)   behind UPDATE(b), then the READ of a block that it makes room for

A step may be played in two phases: to the leaves of each micro-batch, by a HEAD(m) without
gradients behind forward, and back from there, once a loss of all of them is known.

A list has two readings. From top to bottom it is a serial program: the reference plays just that,
and "the last writer" of anything means the last one above. Per lane it is that lane's queue.

Laws (tests/step/test_schedule.py)
    1. Waits point upwards, so the first unfinished op of a list, and of lists one after another,
       waits for nothing that is unfinished: no shape can deadlock.
    2. Ops of lane `in` are in the order in which compute frees their places: a FETCH below the
       last use of its slot, a RESTORE below the last use of its ring slot. So none is stuck behind
       one whose place is freed later. Freed by the same op, the RESTORE goes first: it is short,
       and needed first. (Those whose places were freed before are on top of the list, and the
       first restores at the turn, where the first inputs to restore have just been stashed.)
       The exception is the head, fetched behind the last layer although its slot is free all the
       time: a fetch that is needed last must not delay the layers.
    3. At the turn the last slots layers are still in their slots and are not fetched again.
    4. So are those of lane `disk`: a READ is below the WRITE that frees its slot, and no READ
       overtakes one that is needed before it.
    5. Ops of lane `comm` are the same on all ranks, in one order, whatever micro-batches each has.
    6. A layer whose activations stay is neither stashed nor restored.
    7. The matrices of a layer are orthogonalized once per step, whatever the number of
       micro-batches.
    8. Per step each other layer is fetched twice and each gradient drained once, whatever the
       number of micro-batches; a second backward fetches and drains once more.
    9. The two phases of a step are its list, with a HEAD(m) more for each micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, islice, pairwise

from megatrain.errors import ScheduleError
from megatrain.step.ops import Op, Role, SlotId
from megatrain.step.resources import OpTable
from megatrain.step.shape import StepShape


def build_step(shape: StepShape, *, pending: bool = False) -> list[Op]:
    """Return one training step; `pending`: with the updates that the last step left to this one."""
    table = OpTable(shape)
    return [*_to_turn(table, pending=pending), *_from_turn(table)]


def build_leaves(shape: StepShape, *, pending: bool = False) -> list[Op]:
    """Return the first phase of a step: forward, and the leaves of each micro-batch."""
    table = OpTable(shape)
    leaves = [table.head(micro, trains=False, visit=0) for micro in range(shape.num_micro)]
    return [*_to_turn(table, pending=pending), *leaves]


def build_return(shape: StepShape) -> list[Op]:
    """Return the second phase of a step: the loss's gradient back through all blocks."""
    return list(_from_turn(OpTable(shape)))


def build_flush(shape: StepShape) -> list[Op]:
    """Return the pending updates alone: what must be done before others read the weights."""
    return list(chain.from_iterable(_pending_updates(OpTable(shape))))


def build_forward(shape: StepShape) -> list[Op]:
    """Return an evaluation: forward and the loss of each micro-batch, no tape, no gradients."""
    table = OpTable(shape)
    losses = [table.head(micro, trains=False) for micro in range(shape.num_micro)]
    return [*_forward(table, iter(()), trains=False), *_balance(table), *losses]


def _pending_updates(table: OpTable) -> Iterator[list[Op]]:
    """Yield what updates each block, nothing for a frozen one, in the order of forward."""
    shape = table.shape
    if shape.update != "late":
        raise ScheduleError(f'no update is ever pending with update="{shape.update}"')
    return _updates_in_order(table)


def _updates_in_order(table: OpTable) -> Iterator[list[Op]]:
    shape, reads = table.shape, _reads(table)
    next(reads)  # by the step that left the updates
    following = dict(pairwise(shape.update_order))
    begun: set[int] = set()
    for block in range(shape.num_blocks):
        ops: list[Op] = []
        for matrices in (block, following.get(block)) if shape.matrices[block] else ():
            if (
                matrices is not None
                and _may_begin(table, matrices, block)
                and (matrices not in begun)
            ):
                begun.add(matrices)
                ops += [*_sent(table, matrices), table.orthogonalize(matrices)]
        if shape.matrices[block]:
            ops += _returned(table, block)
        if shape.trained[block]:
            ops += _update(table, block, reads)
        yield ops


def _may_begin(table: OpTable, block: int, before: int) -> bool:
    """Return whether directions of a layer can be made before the update of another, or for it.

    Both then have a gradient slot, and a place between disk and update.
    """
    shape, places = table.shape, table.places
    if block == before or not shape.matrices[block]:
        return block == before
    has_slot = not shape.copying or places[block].grad_slot != places[before].grad_slot
    return has_slot and (not shape.has_tier or shape.tier_slots > 1)


def _sent(table: OpTable, block: int) -> Iterator[Op]:
    yield table.momentum(block)
    if table.shape.copying:
        yield table.send(block)
    if table.shape.divided:
        yield table.collect(block)


def _returned(table: OpTable, block: int) -> list[Op]:
    return [table.return_(block)] if table.shape.copying else []


def _to_turn(table: OpTable, *, pending: bool) -> Iterator[Op]:
    """Yield what precedes the heads."""
    if table.shape.update != "late":
        yield from next(_reads(table))
    updates = _pending_updates(table) if pending else iter(())
    yield from _forward(table, updates, trains=True)
    yield from islice(_all_restores(table), table.shape.tape_slots)
    yield from _balance(table)


def _from_turn(table: OpTable) -> Iterator[Op]:
    """Yield heads and backward."""
    reads, late = _reads(table), table.shape.update == "late"
    if not late:
        next(reads)  # on top of the step
    restores = _all_restores(table)
    list(islice(restores, table.shape.tape_slots))  # at the turn
    visits = 2 if table.shape.goes_back_twice else 1
    for visit in range(1, visits):
        yield from _backward(table, reads, restores, visit)
        yield table.clip()
    yield from _backward(table, reads, restores, visits)
    if late:
        yield from next(reads)
        yield table.clip()


def _all_restores(table: OpTable) -> Iterator[Op]:
    visits = 2 if table.shape.goes_back_twice else 1
    return chain.from_iterable(_restores(table, visit + 1) for visit in range(visits))


def _reads(table: OpTable) -> Iterator[list[Op]]:
    """Yield what to read at once: into an empty ring, and then behind the update of each block."""
    order = table.shape.update_order if table.shape.has_tier else []
    by_turn = defaultdict(list)
    freed_by: dict[SlotId | None, int] = {}
    turn = 0
    for number, block in enumerate(order, start=1):
        slot = table.places[block].tier_slot
        turn = max(turn, freed_by.get(slot, 0))
        freed_by[slot] = number
        by_turn[turn].append(table.read(block))
    for turn in range(1 + len(table.shape.update_order)):
        yield by_turn[turn]


def _update(table: OpTable, block: int, reads: Iterator[list[Op]]) -> Iterator[Op]:
    yield table.update(block)
    if table.shape.has_tier:
        yield table.write(block)
    yield from next(reads)


def _forward(table: OpTable, updates: Iterator[list[Op]], *, trains: bool) -> Iterator[Op]:
    """Yield forward, with the updates that are left to it.

    These are on top, unless some need the device: then each is before the fetch of its block.
    """
    shape = table.shape
    if not shape.matrix_blocks:
        yield from chain.from_iterable(updates)
    fetches = _fetches_of_forward(table, updates)
    for fetched in islice(fetches, 1 + shape.slots):
        yield from fetched
    for block in range(shape.head):
        for micro in range(shape.num_micro):
            yield table.forward(block, micro, trains=trains)
            if trains and block in shape.taped_layers and shape.tape == "host":
                yield table.stash(block, micro)
        if shape.role(block) is Role.LAYER:
            yield from next(fetches, ())


def _fetches_of_forward(table: OpTable, updates: Iterator[list[Op]]) -> Iterator[list[Op]]:
    """Yield what to fetch at once, each time a slot is free: the head comes with the last layer."""
    for block in range(table.shape.last_layer):
        yield next(updates, []) + _fetch(table, block)
    last = [op for block in (table.shape.last_layer, table.shape.head) for op in next(updates, [])]
    yield last + _fetch(table, table.shape.last_layer) + _fetch(table, table.shape.head)


def _fetch(table: OpTable, block: int) -> list[Op]:
    if table.places[block].slot is None:
        return []
    return [table.fetch(block), *([table.gather(block)] if table.shape.divided else [])]


def _backward(
    table: OpTable, reads: Iterator[list[Op]], restores: Iterator[Op], visit: int
) -> Iterator[Op]:
    """Yield the head and backward, for the first time of a step or for the second."""
    shape = table.shape
    handed = _HandOver(table, reads, visit)
    for micro in range(shape.num_micro):
        yield table.head(micro, trains=True, visit=visit)
    yield from handed.over(shape.head)
    for layer in range(shape.last_layer, shape.bottom_layer - 1, -1):
        for micro in range(shape.num_micro):
            yield table.backward(layer, micro, visit=visit)
            if layer in shape.taped_layers:
                yield from islice(restores, 1)
        yield from handed.over(layer)
        yield from _fetches_behind(table, layer, visit)
    if shape.trained[0]:
        for micro in range(shape.num_micro):
            yield table.backward(0, micro, visit=visit)
        yield from handed.over(0)
    yield from handed.finish()


def _fetches_behind(table: OpTable, layer: int, visit: int) -> list[Op]:
    """Return the fetch of the next layer that needs the slot of one that went back, if any.

    Behind the lowest layers of the first of two backwards these are the top ones again.
    """
    shape = table.shape
    if layer - shape.slots >= shape.bottom_layer:
        return _fetch(table, layer - shape.slots)
    top = shape.last_layer - (shape.last_layer - layer) % shape.slots
    if table.comes_again(visit) and top != layer:
        return _fetch(table, top)
    return []


def _balance(table: OpTable) -> list[Op]:
    return [table.balance()] if table.shape.balances and table.shape.divided else []


def _restores(table: OpTable, visit: int) -> Iterator[Op]:
    if table.shape.tape == "host":
        for layer in reversed(table.shape.taped_layers):
            for micro in range(table.shape.num_micro):
                yield table.restore(layer, micro, visit=visit)


class _HandOver:
    """What follows the last part of each block's gradient in one backward.

    A layer whose directions are on their way is updated behind the backward of the next one, which
    uses the other gradient slot meanwhile. With one slot for all, nothing can come between.
    """

    def __init__(self, table: OpTable, reads: Iterator[list[Op]], visit: int) -> None:
        self._table, self._reads, self._visit = table, reads, visit
        self._updates = table.shape.updates_in_backward and not table.comes_again(visit)
        self._sent: int | None = None

    def over(self, block: int) -> Iterator[Op]:
        table, shape = self._table, self._table.shape
        if not shape.trained[block]:
            return
        yield from self.finish()
        if shape.divided:
            yield table.exchange(block)
        yield table.drain(block)
        yield table.norm(block, visit=self._visit)
        if not self._updates:
            return
        if shape.matrices[block]:
            yield from _sent(table, block)
            self._sent = block
            if shape.grad_slots == 1:
                yield from self.finish()
        else:
            yield from _update(table, block, self._reads)

    def finish(self) -> Iterator[Op]:
        """Yield the update of the layer whose directions are on their way, if there is one."""
        block, self._sent = self._sent, None
        if block is not None:
            yield self._table.orthogonalize(block)
            yield from _returned(self._table, block)
            yield from _update(self._table, block, self._reads)


def build_ops(kind: str, shape: StepShape) -> list[Op]:
    """Return the ops of a `step`, its phases `leaves` and `return`, a `forward` or a `flush`.

    A step and its leaves may be `pending`: with the updates of the last one.
    """
    if kind == "forward":
        return build_forward(shape)
    if kind == "flush":
        return build_flush(shape)
    if kind == "return":
        return build_return(shape)
    build = build_leaves if kind.endswith("leaves") else build_step
    return build(shape, pending=kind.startswith("pending"))
