"""The plan against what happens: memory, time, and whether the choice was the best.

    python -m benchmarks.plan --memory | --cap | --time | --choice [--json] [--rounds 3] [--steps 2]

Small Llamas of random weights, on this machine's CPU: compute reads the store (`views`), or copies
blocks into slots as an accelerator would (`copies`), with the tape on either side.

--memory: 30 configurations, each in a process of its own. The ledger's host total against the most
that was resident. What Python and libraries hold is measured once, in a process that has trained a
model of no size, as the profile of a machine has it. malloc is told to give memory from 1 MiB on
back when it is freed; left alone it keeps up to 80 MiB, now more, now less (`--keeping` shows it).

    worst, median         of |predicted / measured - 1|

--cap: runs of the trainer in a control group whose limit is 0.5 to 1.2 of their plan
(plan_cap.py).

    died                  starts that the kernel killed
    refused_above         refusals with a limit of 1.1 and more
    stopped               runs that saw the limit come, saved, and ended by themselves

--time: 17 configurations (plan_time.py), with real compute and with each lane slowed down.

    worst, median         of |predicted / measured - 1| of the step time, each the median of rounds
    limits_named          share of the slowed cases whose slow lane was named as the limit, always

--choice: on three such machines, every combination of micro-batch, slots and tape is tried, in
turns; the planner chooses before.

    choice_over_best      step time of its choice over that of the best, by measurement; worst grid
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import LlamaConfig

from benchmarks.step import build_store
from megatrain.devices.device import CpuDevice
from megatrain.engine.batch import MicroBatch
from megatrain.engine.engine import Engine
from megatrain.memory.host import resident_bytes
from megatrain.optim.adamw import AdamW
from megatrain.optim.states import WITH_CLIP, WITHOUT_CLIP
from megatrain.planning.bytes import SAVE_BYTES, predicted_ledger
from megatrain.planning.catalog.families import shape_from_config
from megatrain.planning.machine.profile import MachineProfile, unmeasured
from megatrain.planning.workload import ModelShape, Workload
from megatrain.step.settings import StepSettings
from testkit.engines import make_engine

GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
MEMORY_TARGETS = {"worst": 0.03}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A model, a batch, and how to run it."""

    hidden: int
    inner: int
    layers: int
    vocab: int = 8192
    num_micro: int = 1
    rows: int = 1
    length: int = 256
    update: Literal["in_backward", "late"] = "late"
    device: Literal["views", "copies"] = "views"
    tape: Literal["device", "host"] = "device"
    slots: int = 2
    chunk_tokens: int = 4096
    tied: bool = False

    def __str__(self) -> str:
        size = f"{self.hidden}x{self.layers}"
        batch = f"{self.num_micro}x{self.rows}x{self.length}"
        return f"{size} {batch} {self.update} {self.device} tape {self.tape} slots {self.slots}"

    @property
    def config(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=max(1, self.hidden // 128),
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
        )

    @property
    def model(self) -> ModelShape:
        return shape_from_config(self.config.to_dict())

    @property
    def workload(self) -> Workload:
        tokens = self.num_micro * self.rows * self.length
        return Workload(model=self.model, step_tokens=tokens, sequence=self.length)

    @property
    def settings(self) -> StepSettings:
        return StepSettings(
            micro_batch_tokens=self.rows * self.length,
            slots=self.slots,
            tape=self.tape,
            update=self.update,
            chunk_tokens=self.chunk_tokens,
        )

    def batch(self) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.rows, self.length)
        tokens = [
            torch.randint(0, self.vocab, shape, generator=generator) for _ in range(self.num_micro)
        ]
        return [MicroBatch(input_ids=ids, labels=ids) for ids in tokens]

    def engine(self, **arguments: Any) -> Engine:
        late = self.update == "late"
        decoder, store = build_store(self.config, WITH_CLIP if late else WITHOUT_CLIP)
        optimizer = AdamW(learning_rate=1e-5, max_grad_norm=1.0 if late else None)
        return make_engine(
            decoder,
            store,
            optimizer=optimizer,
            device=CpuDevice(copying=self.device == "copies"),
            **self.settings.facts(),
            **arguments,
        )


_SIZES = [(128, 384, 2), (256, 768, 4), (512, 1408, 4), (512, 1408, 8), (768, 2048, 8)]
NOTHING = Configuration(hidden=128, inner=256, layers=1, vocab=512, length=64)


def memory_configurations() -> list[Configuration]:
    """Return thirty: sizes, policies, places, micro-batches."""
    found = []
    for number, (hidden, inner, layers) in enumerate(_SIZES):
        size: dict[str, Any] = {"hidden": hidden, "inner": inner, "layers": layers}
        longer: dict[str, Any] = {"rows": 2, "length": 512}
        found += [
            Configuration(**size, update="late", **longer),
            Configuration(**size, update="in_backward", num_micro=3),
            Configuration(**size, update="late", device="copies", tape="host", num_micro=2),
            Configuration(**size, update="in_backward", device="copies", slots=2 + number % 3),
        ]
    middle: dict[str, Any] = {"hidden": 1024, "inner": 2816, "vocab": 32000}
    found += [
        Configuration(**middle, layers=4, update="late"),
        Configuration(**middle, layers=4, update="in_backward", tied=True),
        Configuration(**middle, layers=4, update="late", rows=4, chunk_tokens=256),
        Configuration(**middle, layers=8, update="in_backward", num_micro=2, length=128),
        Configuration(**middle, layers=8, update="late", device="copies", tape="host"),
        Configuration(**middle, layers=12, update="late", length=512),
        Configuration(**middle, layers=16, update="in_backward", length=128),
        Configuration(**middle, layers=16, update="late", device="copies", slots=4, length=64),
    ]
    large: dict[str, Any] = middle | {"hidden": 1792, "inner": 6144, "layers": 16, "length": 64}
    found += [
        Configuration(**large, update="in_backward"),
        Configuration(**large, update="late", num_micro=2),
    ]
    return found


def plain_profile(base_bytes: int) -> MachineProfile:
    """Return a profile for memory alone: no rate matters."""
    return unmeasured(ram_bytes=1 << 40, base_bytes=base_bytes).changed(cores=2)


def predicted_bytes(configuration: Configuration, base_bytes: int) -> int:
    """Return the host total of the ledger for a run that saves nothing."""
    profile = plain_profile(base_bytes).changed(unified=configuration.device == "views")
    ledger = predicted_ledger(profile, configuration.workload, configuration.settings)
    return ledger.total("host") - SAVE_BYTES


def measure_memory(
    chosen: Sequence[Configuration], environment: Mapping[str, str]
) -> dict[str, object]:
    """Return the figures with --memory."""
    base = _alone(NOTHING, environment)["peak"] - predicted_bytes(NOTHING, 0)
    rows = []
    for configuration in chosen:
        measured = _alone(configuration, environment)["peak"]
        predicted = predicted_bytes(configuration, base)
        rows.append(
            {
                "configuration": str(configuration),
                "params": configuration.model.params,
                "predicted_mib": round(predicted / 2**20, 1),
                "measured_mib": round(measured / 2**20, 1),
                "ratio": round(predicted / measured, 4),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    errors = [abs(float(str(row["ratio"])) - 1) for row in rows]
    return {
        "configurations": len(rows),
        "base_mib": round(base / 2**20, 1),
        "worst": round(max(errors), 4),
        "median": round(statistics.median(errors), 4),
        "rows": rows,
        "targets": MEMORY_TARGETS,
    }


def _alone(configuration: Configuration, environment: Mapping[str, str]) -> dict[str, int]:
    """Return the resident bytes of two steps in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.plan", "--alone"]
    command.append(json.dumps(asdict(configuration)))
    variables = {**os.environ, **environment}
    output = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=variables
    ).stdout
    figures: dict[str, int] = json.loads(output)
    return figures


def run_alone(configuration: Configuration) -> dict[str, int]:
    """Take two steps; return what was resident at most, and afterwards."""
    with configuration.engine() as engine:
        for _ in range(2):
            engine.step(configuration.batch())
    del engine
    peak = _peak_bytes()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return {"peak": peak, "settled": resident_bytes()}


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1024


def _figures(options: argparse.Namespace) -> dict[str, object]:
    from benchmarks.plan_cap import measure_caps
    from benchmarks.plan_time import measure_choice, measure_time  # it needs this module

    if options.cap:
        return measure_caps()
    if options.time:
        return measure_time(options.rounds, options.steps, options.only)
    if options.choice:
        return measure_choice(options.rounds, options.steps, options.only)
    environment = {} if options.keeping else GIVING_BACK
    return measure_memory(memory_configurations()[: options.first or None], environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true", help="ledger against resident peak")
    parser.add_argument("--cap", action="store_true", help="runs under a limit of the kernel's")
    parser.add_argument("--time", action="store_true", help="predicted against measured steps")
    parser.add_argument("--choice", action="store_true", help="the plan against all others")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", default="", help="one slow lane, or `real`")
    parser.add_argument("--keeping", action="store_true", help="with malloc as it is")
    parser.add_argument("--first", type=int, default=0, help="only so many configurations")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.alone:
        print(json.dumps(run_alone(Configuration(**json.loads(options.alone)))))
        return
    figures = _figures(options)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
