"""A step of another system: the ops of our schedule, some of them repeated or left out.

Micro-batches run one after another, each with its own copies. The physics are the simulator's:
products, attention, element-wise work, copies and host memory cost what they cost ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.published.points import Point
from benchmarks.published.systems import System, system_of
from megatrain.features.registry import build_ops
from megatrain.planning.costs import Cost, Costs
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.model.shapes import BlockShape
from megatrain.planning.simulate import play, step_shape
from megatrain.planning.workload import Workload
from megatrain.step.ops import Op, OpKind, Role
from megatrain.step.settings import StepSettings
from megatrain.step.shape import StepShape


class TheirCosts(Costs):
    """The costs of ops, with another recompute and another optimizer."""

    def __init__(
        self, system: System, profile: MachineProfile, workload: Workload, settings: StepSettings
    ) -> None:
        super().__init__(profile, workload, settings)
        self._system = system

    def _compute_seconds(self, op: Op, block: BlockShape, tokens: int) -> float:
        seconds = super()._compute_seconds(op, block, tokens)
        if op.kind is OpKind.BACKWARD and op.role is Role.LAYER:
            seconds += (self._system.forwards_again - 1) * self.layer_seconds(block, tokens)
        return seconds

    def _norm(self, op: Op, block: BlockShape) -> Cost:
        """On the device, or part of the update's traffic."""
        return Cost(seconds=self.profile.op_overhead_s)

    def _update(self, block: BlockShape) -> Cost:
        params, profile = block.trained_elements(), self.profile
        if self._system.update_copies:
            moved = 2.0 * params * self._system.update_copies
            rate = profile.duplex_share * min(
                profile.copy_in_bytes_per_s, profile.copy_out_bytes_per_s
            )
            return Cost(seconds=moved / rate + profile.op_overhead_s, dram_rate=2 * rate)
        moved = params * self._system.update_bytes
        return self._host(moved / self._update_rate, moved, 0)


def predicted_speed(point: Point) -> float:
    """Return the tokens per second of the point's system on its machine."""
    system, profile = system_of(point), point.profile
    if system.staged:
        staged = profile.copy_in_bytes_per_s * profile.unpinned_share
        profile = profile.changed(copy_in_bytes_per_s=staged)
    workload = Workload(
        model=point.shape,
        step_tokens=point.micro_tokens,
        sequence=point.sequence,
        kernels="liger" if point.fused else "none",
    )
    settings = StepSettings(
        micro_batch_tokens=point.micro_tokens,
        tape=system.tape,
        update="late" if system.update == "after" else "in_backward",
    )
    costs = TheirCosts(system, profile, workload, settings)
    shape = step_shape(settings, workload, unified=False)

    def seconds(ops: Iterator[Op]) -> float:
        played = play(list(ops), costs, profile, tokens=point.micro_tokens)
        backward = [each for each in played.ops if each.op.kind is OpKind.BACKWARD]
        backward_s = max(each.end_s for each in backward) - min(each.start_s for each in backward)
        return max(each.end_s for each in played.ops) - system.backward_saved * backward_s

    num_micro, rest = divmod(point.step, point.micro_tokens)
    assert not rest, f"{point.name}: micro-batches do not fill the step"
    step_s = seconds(_last_micro_batch(shape, system))
    if num_micro > 1:
        alone = replace(shape, update="none")
        step_s += (num_micro - 1) * seconds(
            _micro_batch(build_ops("step", alone), system, is_last=False)
        )
    return point.step / step_s


def _last_micro_batch(shape: StepShape, system: System) -> Iterator[Op]:
    """Yield the ops of a step's last micro-batch and of all updates."""
    step = build_ops("step", shape)
    yield from _micro_batch(step, system, is_last=True)
    if shape.update == "late":
        yield from build_ops("flush", shape)
    if system.returns_weights:
        fetches = {op.block: op for op in step if op.kind is OpKind.FETCH}
        yield from (fetches[block] for block in shape.update_order)


def _micro_batch(ops: list[Op], system: System, *, is_last: bool) -> Iterator[Op]:
    """Yield the ops, each copy as often as the system makes it."""
    is_backward = False
    out, more = system.copies_out
    for op in ops:
        is_backward |= op.kind is OpKind.HEAD
        times = 1
        if op.kind is OpKind.FETCH:
            times = system.copies_in[is_backward]
        elif op.kind is OpKind.DRAIN:
            times = out + more * is_last
        yield from [op] * times
