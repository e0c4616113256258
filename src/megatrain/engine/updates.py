"""Updates: the door through which drained gradients become new weights. Of the host lane.

    NORM(b)        measure(op, gradient)   the squared norm of the block's gradient
    CLIP           judge(step)             all norms into one factor, and whether the step applies
    MOMENTUM(b)    look_ahead(op, ...)     gradients of matrices into directions, in their place
    UPDATE(b)      apply(op, gradient)     master, states and weights of the block, in place
    WRITE(b)       write_back(op, ring)    of the disk lane: what was updated goes back to disk

Late updates follow the verdict of CLIP, which waits for all norms; they may run with the next step.
Updates in backward follow the norm of their block: it is finite, or the block is left out. In a
second backward both hold: CLIP has the norms of the first, and each gradient is measured again.

Where matrices are orthogonalized an update has two parts, with the device between them: MOMENTUM
changes states, UPDATE the weights. It begins with the first, which waits for a snapshot, and is
complete with the second. A failure between the two leaves the block half applied.

An update is complete when all that it changed is where a snapshot reads it: at once, or, if the
block has masters and states on disk, when they are back there. A block that was left out is not
written.

Who waits: `apply`, or `look_ahead` before it, waits while a snapshot holds the block (snapshot.py),
and nothing else does. The caller of a step reads `norm` and `faulty_blocks` once NORM and CLIP are
complete; they are valid until the next step is played.

Where ranks share the store, each updates the part that it owns. They share the squared norms of
their parts, so that all have the same norm and the same verdict.

Laws (tests/engine/test_updates.py)
    1. No gradient that is not finite reaches a weight.
    2. `half_applied` is true from the first update of a step until its last one is complete.
    3. Each block counts its own updates; a block that is left out counts none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from megatrain.engine.snapshot import Gate, Snapshot
from megatrain.errors import NonFiniteStep
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import Segment
from megatrain.memory.store import Store
from megatrain.models.decoder import Param
from megatrain.optim.views import Treatment, UpdateViews, Views
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.step.ops import Op
from megatrain.step.shape import StepShape

if TYPE_CHECKING:
    from megatrain.memory.tier.ring import TierRing

Gradient = Sequence[tuple[Segment, Tensor]]


class Optimizer(Protocol):
    """The interface of an optimizer to the host lane; those in optim/ have it."""

    @property
    def states(self) -> tuple[TensorKind, ...]:
        """The states that `update` is handed, in this order."""

    def treated(self, params: Collection[Param]) -> dict[str, Treatment]:
        """Return the treatment of each param, by name."""

    def squared_norm(self, gradient: Tensor) -> float:
        """Return the sum of squares of a flat gradient; finite exactly when all of it is."""

    def clip_factor(self, norm: float) -> float:
        """Return the factor for all gradients of a step with this norm."""

    def look_ahead(self, views: Views, gradient: Tensor, *, number: int, scale: float) -> None:
        """Make of `scale` x `gradient` the direction of a matrix, in its place.

        Only of matrices that have other states than the rest: `update` gets what becomes of it.
        """

    def update(
        self, views: Views, gradient: Tensor, *, step: int, number: int, scale: float
    ) -> None:
        """Apply `scale` x `gradient` to masters and states, in place.

        `step` is the step of the run and sets the learning rate. `number` counts the updates of
        these elements: it is smaller where steps were skipped or left out. Both count from 1.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision on a block's gradient: whether its update is applied, and scaled by what."""

    step: int
    """The step of the run, from 1: a late update may be played with the next step."""
    scale: float
    applies: bool
    """False: the gradient is not finite, and the block is not updated."""


class Updates:
    """Norms, verdicts and updates of all trained blocks. Without an optimizer it does nothing."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        store: Store,
        shape: StepShape,
        ranks: Ranks = ALONE,
    ) -> None:
        self._optimizer = optimizer
        self._ranks = ranks
        if optimizer is not None:
            self._views = UpdateViews(store, optimizer)
        self._order = shape.update_order
        self._late, self._twice = shape.update == "late", shape.goes_back_twice
        self._gate = Gate(self._order)
        self._unwritten: set[int] = set()
        self._begun: dict[int, int] = {}
        """Numbers of updates whose first part is done, by block."""
        self._squared_norms: dict[int, float] = {}
        self._verdicts: dict[int, Verdict] = {}
        self.norm = 0.0
        """The norm of all gradients of a step, where updates follow it."""
        self.half_applied = False
        """True while some blocks have had a step's update and others not yet."""

    @property
    def faulty_blocks(self) -> tuple[int, ...]:
        """The blocks whose gradient is not finite."""
        norms = sorted(self._squared_norms.items())
        return tuple(block for block, norm in norms if not math.isfinite(norm))

    def measure(self, op: Op, gradient: Gradient, step: int) -> None:
        """Take the norm of the bytes that an update would use: it also shows broken copies."""
        if self._optimizer is None:
            return
        assert op.block is not None
        squared = sum(self._optimizer.squared_norm(part) for _, part in gradient)
        self._squared_norms[op.block] = squared
        if self._late or op.comes_again:
            return
        self._share_norms([op.block])
        applies = math.isfinite(self._squared_norms[op.block])
        if not self._twice:
            self._verdicts[op.block] = Verdict(step=step, scale=1.0, applies=applies)
        elif self._verdicts[op.block].applies and not applies:
            raise NonFiniteStep(
                f"step {step}: the gradient of block {op.block} is finite in the first backward "
                "and not in the second. The device computes other numbers from the same inputs."
            )

    def all_finite(self) -> bool:
        """Return whether the gradients that were just measured are finite, on all ranks."""
        if self._late or self._twice:
            self._share_norms(self._order)
        return not self.faulty_blocks

    def judge(self, step: int) -> None:
        """Decide on all blocks by the norm of the step."""
        assert self._optimizer is not None
        self._share_norms(self._order)
        self.norm = math.sqrt(math.fsum(self._squared_norms.values()))
        applies = math.isfinite(self.norm)
        scale = self._optimizer.clip_factor(self.norm) if applies else 0.0
        verdict = Verdict(step=step, scale=scale, applies=applies)
        self._verdicts = dict.fromkeys(self._order, verdict)

    def _share_norms(self, blocks: Sequence[int]) -> None:
        """Make the squared norms of this rank's parts those of full blocks."""
        shared = self._ranks.share([self._squared_norms[block] for block in blocks])
        for block, of_ranks in zip(blocks, zip(*shared, strict=True), strict=True):
            self._squared_norms[block] = sum(of_ranks)

    def look_ahead(self, op: Op, gradient: Gradient, region: Tensor | None = None) -> int:
        """Begin the update of the op's block, by its verdict: gradients become directions.

        Returns the bytes of gradient it read. `region` has what the block has on disk, if anything.
        """
        block, num_bytes = op.block, 0
        assert block is not None
        assert self._optimizer is not None
        verdict = self._verdicts[block]
        if not verdict.applies:
            return 0
        number = self._begun[block] = self._gate.enter(block)
        self.half_applied = True
        for segment, part in gradient:
            if segment.matrices:
                for span, views in self._views.of(segment, region):
                    self._optimizer.look_ahead(
                        views, part[span], number=number, scale=verdict.scale
                    )
                num_bytes += part.nbytes
        return num_bytes

    def apply(self, op: Op, gradient: Gradient, region: Tensor | None = None) -> int:
        """Update the op's block, by its verdict; return the bytes of gradient it read.

        `region` has what the block has on disk, if anything.
        """
        block, num_bytes = op.block, 0
        assert block is not None
        assert self._optimizer is not None
        verdict = self._verdicts[block]
        if verdict.applies:
            number = self._begun.pop(block, None) or self._gate.enter(block)
            self.half_applied = True
            for segment, part in gradient:
                for span, views in self._views.of(segment, region):
                    self._optimizer.update(
                        views, part[span], step=verdict.step, number=number, scale=verdict.scale
                    )
                num_bytes += part.nbytes
            self._unwritten.add(block)
        if region is None:
            self._complete(block)
        return num_bytes

    def write_back(self, op: Op, ring: TierRing) -> int:
        """Write what the op's block has on disk, if it was updated; return the bytes written."""
        assert op.block is not None
        num_bytes = ring.write(op) if op.block in self._unwritten else 0
        self._complete(op.block)
        return num_bytes

    def _complete(self, block: int) -> None:
        if block in self._unwritten:
            self._unwritten.remove(block)
            self._gate.leave(block)
        if block == self._order[-1]:
            self.half_applied = False

    def snapshot(
        self, order: Sequence[int], num_steps: int, num_updates: Mapping[int, int]
    ) -> Snapshot:
        """Return the state in which blocks have had `num_updates`; updates wait for its reader."""
        return Snapshot(self._gate, order, num_steps, num_updates)

    def behind(self, expected: Mapping[int, int]) -> set[int]:
        """Return the blocks that have had fewer updates than expected. Nothing may be under way."""
        done = self._gate.num_updates
        return {block for block, number in expected.items() if done[block] < number}

    def beyond(self, expected: Mapping[int, int]) -> bool:
        """Return whether some block has had more updates than expected."""
        done = self._gate.num_updates
        return any(done[block] > number for block, number in expected.items())

    def restore(self, num_updates: Mapping[int, int]) -> None:
        """Continue after as many updates of each block. Nothing may be under way."""
        self._gate.num_updates.update(num_updates)

    def fail(self) -> None:
        """Let the reader of a snapshot know that weights may be those of no step."""
        self._gate.fail()
