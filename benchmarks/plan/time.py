"""Predicted against measured step time, and the planner's choice against every other: see plan.py.

A case is a small Llama and, for most, one lane that is slowed down: `in` and `out` by a bandwidth,
`compute` and `host` by a delay, as an accelerator behind a slow link, a slow accelerator, or slow
host memory would be. In each round a machine is measured, then the model is trained, then the
machine is measured again, and the mean of both predictions is held against the time of a step. So
all see the machine as busy as it is at that moment. Where a lane is slowed down, the machine is
measured by a model of two layers that is played one op at a time; where compute is real, by
`megatrain doctor`. Real steps are short and uneven: more of them are taken.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.plan.configurations import Configuration, plain_profile
from megatrain.doctor.examine import examine
from megatrain.doctor.fit import fitted, merged_profiles
from megatrain.lanes.lane import Lane
from megatrain.lanes.trace import Trace
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.plan import make_plan
from megatrain.planning.simulate import Simulation, simulate
from megatrain.step.ops import LANES, Op, OpKind
from testkit.slow_lane import SlowLane

TIME_TARGETS = {"median": 0.10, "worst": 0.20, "limits_named": 1.0}
CHOICE_TARGETS = {"choice_over_best": 1.05}
SLOW_S = 0.08
"""A layer's time in the slow lane: long beside what small tensors and threads cost."""

MORE = 5
"""Times as many steps where compute is real."""

Slow = Literal["", "in", "out", "tape", "host", "compute"]
LIMITS: dict[Slow, str] = {
    "in": "link in",
    "out": "link out",
    "tape": "tape",
    "host": "optimizer",
    "compute": "compute",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and the lane that is slowed down."""

    configuration: Configuration
    slow: Slow = ""
    slow_s: float = SLOW_S

    def lanes(self) -> list[Lane]:
        """Return the lanes; `slow_s` is what a layer, or a row of it, takes in the slow one."""
        model, configuration = self.configuration.model, self.configuration
        layer = model.structures[0]
        bandwidths: dict[str, float] = {}
        delays: dict[str, Callable[[Op], float]] = {}
        match self.slow:
            case "in":
                bandwidths["in"] = layer.weight_bytes("bf16") / self.slow_s
            case "out":
                bandwidths["out"] = layer.gradient_bytes("bf16") / self.slow_s
            case "tape":
                taped = configuration.length * configuration.hidden * 2  # of one row
                bandwidths["in"] = bandwidths["out"] = taped / self.slow_s
            case "host":
                delays["host"] = self._update_delay
            case "compute":
                delays["compute"] = self._compute_delay
        return [
            SlowLane(name, bandwidth=bandwidths.get(name), delay=delays.get(name)) for name in LANES
        ]

    def _update_delay(self, op: Op) -> float:
        if op.kind is not OpKind.UPDATE or op.block is None:
            return 0.0
        model = self.configuration.model
        block = self._block_of(op.block)
        return self.slow_s * block / model.structures[0].trained_elements()

    def _block_of(self, index: int) -> int:
        """Return the elements of a block; models of fewer layers have the same edges."""
        model = self.configuration.model
        if index == 0:
            return model.embedding.trained_elements()
        layers = model.structures[0].trained_elements()
        return layers if index <= self._num_layers else model.head.trained_elements()

    @property
    def _num_layers(self) -> int:
        return self.configuration.layers

    def _compute_delay(self, op: Op) -> float:
        if op.block == 0:
            return 0.0
        rows = self.configuration.rows
        return self.slow_s * rows * (1 if op.kind is OpKind.FORWARD else 3)

    def small(self) -> Case:
        """Return the case with two layers and one micro-batch."""
        return replace(self, configuration=replace(self.configuration, layers=2, num_micro=1))

    def profile(self) -> MachineProfile:
        """Return what a profile starts from; a trace then says the rates."""
        return plain_profile(0).changed(
            unified=False,
            device_bytes_per_s=5e9,
            dram_bytes_per_s=1e12,
            attention_efficiency=0.2,
            duplex_share=1.0,
            op_overhead_s=5e-4,
        )

    def calibrated(self) -> MachineProfile:
        """Return the profile that a short trace of a small model shows."""
        small = self.small()
        _, trace = small.run(2, reference=True)
        spans = [span for span in trace.spans if span.step > 0]
        configuration = small.configuration
        return fitted(self.profile(), configuration.workload, configuration.settings, spans)

    def run(self, num_steps: int, *, reference: bool = False) -> tuple[float, Trace]:
        """Return the seconds of a step, the first not counted, and the trace."""
        batch = self.configuration.batch()
        engine = self.configuration.engine(lanes=self.lanes(), reference=reference, trace=True)
        with engine:
            engine.step(batch)
            begin = time.perf_counter()
            for _ in range(num_steps):
                engine.step(batch)
            seconds = (time.perf_counter() - begin) / num_steps
        assert engine.trace is not None
        return seconds, engine.trace

    def predicted(self, profile: MachineProfile) -> Simulation:
        configuration = self.configuration
        return simulate(profile, configuration.workload, configuration.settings)


def cases() -> list[Case]:
    """Return sizes, micro-batches and policies; real compute, and each lane slowed down."""
    real = [
        Configuration(hidden=256, inner=768, layers=6, length=512),
        Configuration(hidden=256, inner=768, layers=4, num_micro=3, length=512),
        Configuration(hidden=512, inner=1408, layers=4, length=512, update="in_backward"),
        Configuration(hidden=512, inner=1408, layers=3, num_micro=2, length=512),
        Configuration(hidden=1024, inner=2816, layers=6, length=512),
        Configuration(hidden=768, inner=2048, layers=4, num_micro=2, rows=2, length=256),
    ]
    small = Configuration(
        hidden=128, inner=384, layers=8, vocab=512, length=32, device="copies", tape="host"
    )
    slowed: list[tuple[Slow, dict[str, Any]]] = [
        ("in", {}),
        ("in", {"num_micro": 3, "update": "in_backward"}),
        ("in", {"slots": 4, "tape": "device", "layers": 10}),
        ("out", {}),
        ("out", {"num_micro": 2, "update": "in_backward", "tape": "device"}),
        ("host", {}),
        ("host", {"update": "in_backward", "num_micro": 2}),
        ("compute", {"num_micro": 2}),
        ("compute", {"update": "in_backward", "slots": 3}),
        ("tape", {"length": 1024, "num_micro": 3, "layers": 4, "inner": 128}),
        ("tape", {"length": 1024, "num_micro": 2, "layers": 5, "inner": 128}),
    ]
    found = [Case(configuration=configuration) for configuration in real]
    for slow, changes in slowed:
        configuration = replace(small, **changes)
        slow_s = 3 * SLOW_S if slow == "tape" else SLOW_S  # its inputs are long, and computed
        found.append(Case(configuration=configuration, slow=slow, slow_s=slow_s))
    return found


def measure_time(num_rounds: int, num_steps: int, only: str) -> dict[str, object]:
    """Return the figures with --time."""
    rows = []
    for case in cases():
        if only and case.slow != only.replace("real", ""):
            continue
        machine = case.calibrated if case.slow else _doctors_profile
        ratios, limits = [], []
        before = case.predicted(machine())
        for _ in range(num_rounds):
            measured, _ = case.run(num_steps if case.slow else num_steps * MORE)
            after = case.predicted(machine())
            ratios.append((before.step_s + after.step_s) / 2 / measured)
            limits += [before.bottleneck, after.bottleneck]
            before = after
        rows.append(
            {
                "configuration": str(case.configuration),
                "slow": case.slow,
                "measured_s": round(measured, 3),
                "ratio": round(statistics.median(ratios), 4),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "named": statistics.mode(limits),
                "right": not case.slow or set(limits) == {LIMITS[case.slow]},
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    errors = [abs(float(str(row["ratio"])) - 1) for row in rows]
    slowed = [row for row in rows if row["slow"]]
    return {
        "configurations": len(rows),
        "median": round(statistics.median(errors), 4),
        "worst": round(max(errors), 4),
        "limits_named": round(sum(bool(row["right"]) for row in slowed) / max(1, len(slowed)), 3),
        "rows": rows,
        "targets": TIME_TARGETS,
    }


def _doctors_profile() -> MachineProfile:
    """Return what `megatrain doctor` measures now."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["MEGATRAIN_CACHE"] = scratch
        return examine(Path(scratch), lambda said: None).profile


def measure_choice(num_rounds: int, num_steps: int, only: str) -> dict[str, object]:
    """Return the figures with --choice: every plan of a small grid, in turns."""
    rows = []
    for case, grid in _grids():
        if only and case.slow != only:
            continue
        seconds: dict[Configuration, list[float]] = {way: [] for way in grid}
        chosen = _chosen(case, grid)
        for _ in range(num_rounds):
            for way in grid:
                measured, _ = replace(case, configuration=way).run(num_steps)
                seconds[way].append(measured)
        medians = {way: statistics.median(times) for way, times in seconds.items()}
        best = min(medians, key=lambda way: medians[way])
        rows.append(
            {
                "slow": case.slow,
                "plans": len(grid),
                "chosen": str(chosen),
                "best": str(best),
                "choice_over_best": round(medians[chosen] / medians[best], 4),
                "worst_over_best": round(max(medians.values()) / medians[best], 3),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return {
        "grids": len(rows),
        "choice_over_best": max(float(str(row["choice_over_best"])) for row in rows),
        "rows": rows,
        "targets": CHOICE_TARGETS,
    }


def _grids() -> list[tuple[Case, list[Configuration]]]:
    """Return machines, and for each all ways to train one model on it."""
    small = Configuration(
        hidden=128, inner=384, layers=6, vocab=512, length=32, device="copies", tape="host"
    )
    # Inputs of a block count beside its weights only where they are long, and the weights few.
    long = replace(small, length=512, inner=128, layers=4)
    machines: list[tuple[Slow, float, Configuration]] = [
        ("in", 2 * SLOW_S, small),
        ("compute", SLOW_S / 2, small),
        ("tape", SLOW_S / 2, long),
    ]
    tapes: tuple[Literal["device", "host"], ...] = ("device", "host")
    found = []
    for slow, slow_s, model in machines:
        ways = [
            replace(model, rows=rows, num_micro=4 // rows, slots=slots, tape=tape)
            for rows, slots, tape in itertools.product((1, 2, 4), (2, model.layers), tapes)
        ]
        found.append((Case(configuration=model, slow=slow, slow_s=slow_s), ways))
    return found


def _chosen(case: Case, grid: list[Configuration]) -> Configuration:
    """Return what the planner would take, of the grid's settings."""
    large = replace(case, configuration=replace(case.configuration, rows=4))
    profiles = [large.calibrated(), case.calibrated()]  # small ops mostly cost a start
    profile = merged_profiles(profiles).changed(ram_bytes=1 << 40, device_bytes=1 << 30)
    workload = replace(case.configuration.workload, step_tokens=4 * case.configuration.length)
    plan = make_plan(
        profile, workload, pins={"chunk_tokens": "as usual", "gather_embedding": "as usual"}
    )
    settings = plan.settings
    rows = settings.micro_batch_tokens // case.configuration.length
    slots = case.configuration.layers if settings.slots == case.configuration.layers else 2
    wanted = replace(
        case.configuration, rows=rows, num_micro=4 // rows, slots=slots, tape=settings.tape
    )
    assert wanted in grid, wanted
    return wanted
