"""The plain step: FETCH FORWARD HEAD BACKWARD DRAIN NORM CLIP UPDATE.

    forward    FETCH(b), then FORWARD(b,m) for each micro-batch m, block after block
    head       HEAD(m): the loss and its gradient
    backward   FETCH(b), then BACKWARD(b,m), DRAIN(b), NORM(b), block after block
    update     UPDATE(b) behind NORM(b), or late: behind CLIP, on top of the next step's list

Everything else that a step can do is a pass over this list (passes.py), one per feature.

Places. Layer b is in slot (b-1) % slots in forward and in backward, so when backward starts the
last slots layers are where it needs them. Gradients take turns in the order in which backward
reaches them. Embedding and head never take a layer's slot: each has one for its weights, and they
share the gradient slot "edge", which the head has left when backward comes to the embedding. All
rings restart in each step, so all steps of a shape are the same ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatrain.step.ops import OpKind, Resource
from megatrain.step.passes import Draft, Mark, Pass, Step, stream
from megatrain.step.shape import StepShape

CLIP_FACTOR: Resource = ("clip",)


def plain_step(shape: StepShape, *, trains: bool) -> Step:
    """Return a step in the middle of a run, before any pass; or an evaluation.

    The late updates of the step before are on top of it, as ops that are `left`.
    """
    return Step(shape, list(_program(shape, trains=trains)), _plain_places(shape))


class Fetches(Pass):
    """Weights come to slots. A pass as well, for it serves whatever order of compute there is."""

    def ops(self, step: Step) -> Iterable[Draft]:
        return stream(step, "fetched", _fetch, Mark.START)


def _fetch(thing: Resource, user: Draft) -> Draft:
    return Draft(OpKind.FETCH, int(thing[1]), None, (("weights", thing[1]),), (thing,))


def clip(shape: StepShape) -> Draft:
    """Return the op that makes one factor of all norms."""
    norms = tuple(("norm", block) for block in shape.trained_blocks)
    return Draft(OpKind.CLIP, None, None, norms, (CLIP_FACTOR,))


def accumulate(op: Draft, block: int) -> None:
    """Let an op add to the gradient of a block, or begin it."""
    total = (("grad_sum", block),)
    op.also(reads=total if op.adds else (), writes=total)


def _plain_places(shape: StepShape) -> dict[Resource, Resource]:
    places: dict[Resource, Resource] = {}
    slots: dict[int, int | str] = {0: "embedding", shape.head: "head"}
    for block in range(shape.num_blocks):
        slot = slots.get(block, (block - 1) % shape.slots)
        places["fetched", block] = ("slot", slot)
    for layer in shape.layers:
        for micro in range(shape.num_micro):
            places["saved_input", layer, micro] = ("tape", layer, micro)
    turn = 0
    for block in reversed(shape.trained_blocks):
        is_layer = block in shape.layers
        sums, buffer = (turn % shape.grad_slots, turn % shape.host_grads)
        places["grad_sum", block] = ("grad_slot", sums if is_layer else "edge")
        places["drained_grad", block] = (
            ("host_grad", buffer if is_layer else "edge")
            if shape.updates_in_backward
            else ("grad", block)
        )
        places["optim_state", block] = ("master", block)
        turn += is_layer
    return places


def _program(shape: StepShape, *, trains: bool) -> Iterator[Draft]:
    if trains and shape.update == "late":
        for block in shape.trained_blocks:
            yield _update(block, CLIP_FACTOR, left=True)
    yield Draft(Mark.START)
    for block in range(shape.head):
        for micro in range(shape.num_micro):
            yield _forward(shape, block, micro, trains=trains)
        yield _block_end(block)
    yield Draft(Mark.BACKWARD_START)
    for micro in range(shape.num_micro):
        yield _head(shape, micro, trains=trains)
    if trains:
        yield from _hand_over(shape, shape.head)
    yield _block_end(shape.head)
    if not trains:
        return
    for block in range(shape.head - 1, shape.lowest - 1, -1):
        for micro in range(shape.num_micro):
            yield _backward(shape, block, micro)
        yield from _hand_over(shape, block)
        yield _block_end(block)
    yield Draft(Mark.END)
    if shape.update == "late":
        yield clip(shape)


def _block_end(block: int) -> Draft:
    return Draft(Mark.BLOCK_END, block, None, (("fetched", block),))


def _forward(shape: StepShape, block: int, micro: int, *, trains: bool) -> Draft:
    hidden: Resource = ("hidden", micro)
    if block not in shape.layers:
        reads: tuple[Resource, ...] = (("fetched", block),)
    else:
        reads = (("fetched", block), hidden)
    writes: tuple[Resource, ...] = (hidden,)
    if trains and block in shape.layers and block >= shape.lowest:
        writes = (hidden, ("saved_input", block, micro))
    return Draft(OpKind.FORWARD, block, micro, reads, writes, trains=trains)


def _head(shape: StepShape, micro: int, *, trains: bool) -> Draft:
    reads = (("hidden", micro), ("fetched", shape.head))
    op = Draft(OpKind.HEAD, shape.head, micro, reads, (("loss", micro),), trains=trains)
    if trains:
        _go_back(shape, op, shape.head, micro)
    return op


def _backward(shape: StepShape, block: int, micro: int) -> Draft:
    reads: tuple[Resource, ...] = (("fetched", block), ("dhidden", micro))
    if block in shape.layers:
        reads = (*reads, ("saved_input", block, micro))
    op = Draft(OpKind.BACKWARD, block, micro, reads)
    _go_back(shape, op, block, micro)
    return op


def _go_back(shape: StepShape, op: Draft, block: int, micro: int) -> None:
    """Let an op make gradients: of its input if a block below is trained, and of its block."""
    op.adds = micro > 0
    if block > shape.lowest:
        op.passes_gradient = True
        op.also(writes=(("dhidden", micro),))
    if shape.trained[block]:
        accumulate(op, block)


def _hand_over(shape: StepShape, block: int) -> Iterator[Draft]:
    """Yield what follows the last part of a block's gradient."""
    if not shape.trained[block]:
        return
    gradient, norm = ("drained_grad", block), ("norm", block)
    yield Draft(OpKind.DRAIN, block, None, (("grad_sum", block),), (gradient,))
    yield Draft(OpKind.NORM, block, None, (gradient,), (norm,))
    if shape.updates_in_backward:
        yield _update(block, norm)


def _update(block: int, scale: Resource, *, left: bool = False) -> Draft:
    """Return the update of a block.

    A late one takes its scale from the clip factor; one in backward reads whether its gradient is
    finite.
    """
    state = ("optim_state", block)
    reads = (("drained_grad", block), scale, state)
    return Draft(OpKind.UPDATE, block, None, reads, (state, ("weights", block)), left=left)
