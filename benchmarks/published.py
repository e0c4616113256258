"""What the simulator gives for machines and models that others have published speeds of.

    python -m benchmarks.published

    reached    tokens/s as published (TFLOPS at 6 FLOPs per parameter and token turned into tokens)
    ceiling    ours with perfect kernels: products at the sustained rate, attention as fast,
               element-wise work and starting ops free. Link, DRAM, optimizer and schedule remain
    expected   ours with the model's own kernels, one after the other, as Hugging Face writes them

A ceiling below what was reached would mean that a profile or the simulator is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.catalog.families import shape_from_config
from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.simulate import Simulation, simulate
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

HOST_BYTES = 4 << 40
"""Enough for each of the models: memory is not what is compared here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One published speed."""

    who: str
    model: str
    machine: str
    step_tokens: int
    tokens_per_s: float | None = None
    tflops: float | None = None
    """At 6 FLOPs per parameter and token, as the paper counts."""
    sequence: int = 1024
    changes: dict[str, float] = field(default_factory=dict)
    """In what their machine differs from the reference."""

    @property
    def shape(self) -> ModelShape:
        return shape_from_config(find_known_model(self.model).config, self.model)

    @property
    def profile(self) -> MachineProfile:
        machine, _ = find_machine(self.machine)
        return machine.profile(ram_bytes=HOST_BYTES).changed(**self.changes)

    @property
    def reached(self) -> float:
        if self.tokens_per_s is not None:
            return self.tokens_per_s
        assert self.tflops is not None
        return self.tflops * 1e12 / (6 * self.shape.params)


PCIE_3 = {"copy_in_bytes_per_s": 12e9, "copy_out_bytes_per_s": 12e9}
BATCH = 131072
"""Where a source gives no tokens per step: enough that copies and updates hide."""
POINTS = (
    Point(who="LLMQ", model="Qwen/Qwen2.5-14B", machine="4090", step_tokens=BATCH,
          tokens_per_s=1350),
    Point(who="DeepSpeed", model="meta-llama/Llama-3.1-8B", machine="4090", step_tokens=8192,
          tokens_per_s=914),
    Point(who="DeepSpeed", model="meta-llama/Llama-3.1-8B", machine="4090", step_tokens=16384,
          tokens_per_s=1373),
    Point(who="DeepSpeed", model="meta-llama/Llama-3.1-8B", machine="4090", step_tokens=32768,
          tokens_per_s=1791),
    Point(who="paper", model="Qwen/Qwen2.5-14B", machine="3090", step_tokens=24576,
          tokens_per_s=341, changes=PCIE_3),
    Point(who="paper", model="Qwen/Qwen2.5-14B", machine="A6000", step_tokens=24576,
          tokens_per_s=641),
    Point(who="paper", model="Qwen/Qwen2.5-7B", machine="GH200", step_tokens=BATCH, tflops=284),
    Point(who="paper", model="Qwen/Qwen2.5-14B", machine="GH200", step_tokens=BATCH, tflops=264),
    Point(who="paper", model="Qwen/Qwen2.5-32B", machine="GH200", step_tokens=BATCH, tflops=259),
    Point(who="paper", model="Qwen/Qwen2.5-72B", machine="H200", step_tokens=BATCH, tflops=288),
)  # fmt: skip


def perfect(profile: MachineProfile) -> MachineProfile:
    """Return the machine with kernels that nothing can beat."""
    return profile.changed(device_bytes_per_s=1e18, attention_efficiency=1.0, op_overhead_s=1e-9)


def best(point: Point, profile: MachineProfile) -> Simulation:
    """Return the fastest of the usual ways to run the point's work."""
    workload = Workload(model=point.shape, step_tokens=point.step_tokens, sequence=point.sequence)
    played = (simulate(profile, workload, settings) for settings in _ways(point.step_tokens))
    return max(played, key=lambda one: one.tokens_per_s)


def _ways(step_tokens: int) -> Iterator[StepSettings]:
    for micro_batch_tokens in {min(step_tokens, 8192), min(step_tokens, 16384)}:
        yield StepSettings(micro_batch_tokens=micro_batch_tokens, tape="host", update="late")
        yield StepSettings(micro_batch_tokens=micro_batch_tokens, tape="host", update="in_backward")


def main() -> None:
    print(f"{'who':10}{'model':20}{'machine':9}{'step':>5}{'reached':>9}{'ceiling':>9}", end="")
    print(f"{'ratio':>7}{'expected':>10}")
    for point in POINTS:
        ceiling = best(point, perfect(point.profile)).tokens_per_s
        expected = best(point, point.profile).tokens_per_s
        model = point.model.rpartition("/")[2]
        print(
            f"{point.who:10}{model:20}{point.machine:9}{point.step_tokens >> 10:>4}k"
            f"{point.reached:>9,.0f}{ceiling:>9,.0f}{ceiling / point.reached:>7.2f}"
            f"{expected:>10,.0f}"
        )


if __name__ == "__main__":
    main()
