"""A machine profile fitted to a trace: rates that reproduce the measured times of ops.

Products, attention and element-wise work measured apart add up to a block only roughly: a cache
that holds, a library that starts threads. Here the rates are chosen so that the ops of a trace
cost what they took. Works on any trace of any run, so a prediction can be held to the machine it
was made for.

Laws (tests/doctor/test_fit.py)
    1. A trace that was simulated with some rates gives those rates back.
    2. Figures without data in the trace keep their values.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatrain.lanes.trace import Span
from megatrain.memory.kinds import update_traffic
from megatrain.optim.states import ADAMW
from megatrain.planning.costs import Costs
from megatrain.planning.machine.profile import FlopRate, MachineProfile
from megatrain.planning.workload import Workload
from megatrain.step.ops import OpKind, Role
from megatrain.step.settings import StepSettings

_LEAST = 0.3
"""The smallest part of a block's time that is attributed to matrix products."""


def fitted(
    profile: MachineProfile, workload: Workload, settings: StepSettings, spans: Iterable[Span]
) -> MachineProfile:
    """Return the profile with the rates that `spans`, of steps of the workload, show.

    All micro-batches must be of one size. Its products are known at this width and size alone.
    """
    return _Fit(profile, workload, settings, list(spans)).run()


def merged_profiles(profiles: Sequence[MachineProfile]) -> MachineProfile:
    """Return the first profile with the product rates of all: one table from several fits."""
    return profiles[0].changed(
        forward_flops=tuple(point for one in profiles for point in one.forward_flops),
        backward_flops=tuple(point for one in profiles for point in one.backward_flops),
    )


class _Fit:
    def __init__(
        self,
        profile: MachineProfile,
        workload: Workload,
        settings: StepSettings,
        spans: Sequence[Span],
    ) -> None:
        self.profile, self.workload, self.settings = profile, workload, settings
        self._tokens = workload.micro_sizes(settings.micro_batch_tokens)[0]
        self._layer = workload.model.layers[0]
        self._seconds: dict[tuple[OpKind, Role | None, bool], list[float]] = {}
        for span in spans:
            if span.awaited is None:
                key = (span.op.kind, span.op.role, span.op.adds)
                self._seconds.setdefault(key, []).append(span.seconds)

    def run(self) -> MachineProfile:
        self._fit_link()
        self._fit_update()
        self._fit_forward()
        self._fit_backward()
        self._fit_head()
        return self.profile

    def _median(self, kind: OpKind, role: Role = Role.LAYER, adds: bool = False) -> float | None:
        """Return an op's usual seconds, without what every op costs; None if there was none."""
        times = self._seconds.get((kind, role, adds))
        if not times:
            return None
        return max(1e-9, statistics.median(times) - self.profile.op_overhead_s)

    def _fit_link(self) -> None:
        dtype = self.workload.dtype
        fetched, drained = self._median(OpKind.FETCH), self._median(OpKind.DRAIN)
        if fetched:
            rate = self._layer.weight_bytes(dtype) / fetched
            self.profile = replace(self.profile, copy_in_bytes_per_s=rate)
        if drained and not self.profile.unified:
            rate = self._layer.gradient_bytes(dtype) / drained
            self.profile = replace(self.profile, copy_out_bytes_per_s=rate)

    def _fit_update(self) -> None:
        if updated := self._median(OpKind.UPDATE):
            states = self.workload.states[self.settings.state]
            traffic = update_traffic(states, is_fp32=self.workload.dtype == "fp32")
            rate = self._layer.trained_elements() * traffic / update_traffic(ADAMW) / updated
            self.profile = replace(self.profile, update_params_per_s=rate)

    def _fit_forward(self) -> None:
        measured = self._median(OpKind.FORWARD)
        if not measured:
            return
        passes = self._costs.passes(self._layer, self._tokens)
        passes += self._costs.score_seconds(self._layer, self._tokens)
        if passes > (1 - _LEAST) * measured:
            rate = self.profile.device_bytes_per_s * passes / ((1 - _LEAST) * measured)
            self.profile = replace(self.profile, device_bytes_per_s=rate)
            passes = (1 - _LEAST) * measured
        attention = self._costs.attention_flops(self._layer, self._tokens)
        flops = self._product_flops() + attention / self.profile.attention_efficiency
        rate = flops / (measured - passes) / self._dtype_share
        points = (FlopRate(self.workload.model.hidden, self._tokens, rate),)
        self.profile = replace(self.profile, forward_flops=points)

    def _fit_backward(self) -> None:
        adds = (OpKind.BACKWARD, Role.LAYER, False) not in self._seconds
        measured, forward = self._median(OpKind.BACKWARD, adds=adds), self._median(OpKind.FORWARD)
        if not measured or not forward:
            return
        costs = self._costs
        others = costs.passes(self._layer, self._tokens, backward=True)
        others += costs.attention_seconds(self._layer, self._tokens, backward=True)
        others += costs.add_up(self._layer, adds=adds)
        left = max(measured - forward - others, _LEAST * (measured - forward), 1e-9)
        rate = 2 * self._product_flops() / left / self._dtype_share
        points = (FlopRate(self.workload.model.hidden, self._tokens, rate),)
        self.profile = replace(self.profile, backward_flops=points)

    def _fit_head(self) -> None:
        measured = self._median(OpKind.HEAD, Role.HEAD)
        if measured:
            said = self._costs.head_seconds(self._tokens) * self.profile.head_efficiency
            self.profile = replace(self.profile, head_efficiency=said / measured)

    @property
    def _costs(self) -> Costs:
        return Costs(self.profile, self.workload, self.settings)

    @property
    def _dtype_share(self) -> float:
        return 1.0 if self.workload.dtype == "bf16" else self.profile.fp32_efficiency

    def _product_flops(self) -> float:
        return self._layer.matmul_flops_per_token * self._tokens
