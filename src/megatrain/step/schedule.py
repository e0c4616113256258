"""The lists that an engine plays: a step, its two phases, a flush, an evaluation.

A list has two readings. From top to bottom it is a serial program: the reference plays just that,
and "the last writer" of anything means the last one above. Per lane it is that lane's queue.

One list is built, of a step in the middle of a run: the plain program (program.py), rewritten by
the passes of the features that are on (passes.py). On top of it are the updates that the step
before left. All lists of an engine are parts of it:

    step             without what is left
    pending step     all of it
    flush            what is left alone: what must be done before others read the weights
    leaves, return   the two phases of a step, cut where backward starts. Between them a loss of all
                     micro-batches is computed, of what a HEAD(m) without gradients gives
    forward          an evaluation: a program without backward, to which most passes add nothing

Laws (tests/features/test_schedule.py)
    1. Waits point upwards, so the first unfinished op of a list, and of lists one after another,
       waits for nothing that is unfinished: no shape can deadlock.
    2. Ops of lane `in` are in the order in which compute frees their places: a FETCH below the
       last use of its slot, a RESTORE below the last use of its ring slot. So none is stuck behind
       one whose place is freed later. Freed by the same op, the RESTORE goes first: it is short,
       and needed first.
       The exception is the head, fetched behind the last layer although its slot is free all the
       time: a fetch that is needed last must not delay the layers.
    3. When backward starts, the last slots layers are still in their slots and are not fetched
       again.
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

from collections.abc import Sequence

from megatrain.errors import ScheduleError
from megatrain.step.ops import Op, OpKind
from megatrain.step.passes import Draft, Mark, Pass, Step, placed
from megatrain.step.program import plain_step
from megatrain.step.shape import StepShape


def steady_step(shape: StepShape, passes: Sequence[Pass], *, trains: bool = True) -> Step:
    """Return a step in the middle of a run, or an evaluation, with its marks."""
    step = plain_step(shape, trains=trains)
    for one in passes:
        one.places(step)
    for one in passes:
        step.ops = list(one.ops(step))
    return step


def build_ops(kind: str, shape: StepShape, passes: Sequence[Pass]) -> list[Op]:
    """Return the ops of a `step`, its phases `leaves` and `return`, a `forward` or a `flush`.

    A step and its leaves may be `pending`: with the updates of the last one.
    """
    is_pending = kind.startswith("pending")
    if (is_pending or kind == "flush") and shape.update != "late":
        raise ScheduleError(f'no update is ever pending with update="{shape.update}"')
    step = steady_step(shape, passes, trains=kind != "forward")
    ops = step.ops
    if kind == "flush":
        return placed(step, [op for op in ops if op.left])
    if kind != "forward" and not is_pending:
        ops = [op for op in ops if not op.left]
    if kind == "return" or kind.endswith("leaves"):
        middle = next(i for i, op in enumerate(ops) if op.kind is Mark.BACKWARD_START)
        ops = ops[middle:] if kind == "return" else [*ops[:middle], *_leaves(shape, passes)]
    return placed(step, ops)


def _leaves(shape: StepShape, passes: Sequence[Pass]) -> Sequence[Draft]:
    """Return the heads of an evaluation; those that train come behind them."""
    evaluated = steady_step(shape, passes, trains=False).ops
    heads = [op for op in evaluated if op.kind is OpKind.HEAD]
    for op in heads:
        op.comes_again = True
    return heads
