"""Predicted against measured step time on ranks: processes with gloo, on this machine.

In each round the machine is measured, then the model is trained by 2 and by 4 ranks, then the
machine is measured again, and the mean of both predictions is held against the time of a step, as
in time.py. A machine is measured as `doctor` does under torchrun: by trial steps of one process,
one thread, and by collectives of as many ranks as will train.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.plan.configurations import Configuration
from benchmarks.step import build_store
from megatrain.devices.device import CpuDevice
from megatrain.doctor.between_ranks import measured_network
from megatrain.doctor.examine import examine
from megatrain.engine.engine import Engine
from megatrain.memory.kinds import store_kinds
from megatrain.optim.adamw import AdamW
from megatrain.optim.states import STATES
from megatrain.planning.machine.network import Network
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.ranks.division import Division
from megatrain.planning.ranks.sharing import as_rank
from megatrain.planning.simulate import Simulation, simulate
from megatrain.ranks.ranks import Ranks
from testkit.rank_processes import run_ranks

RANKS_TARGETS = {"worst": 0.20}
SIZES = (2, 4)


def rank_configurations() -> list[Configuration]:
    """Return small Llamas; a step has a micro-batch for each of four ranks."""
    return [
        Configuration(hidden=256, inner=768, layers=4, num_micro=4, length=256, device="copies"),
        Configuration(hidden=512, inner=1408, layers=4, num_micro=4, length=256, device="copies"),
        Configuration(
            hidden=512, inner=1408, layers=4, num_micro=8, length=128, device="copies",
            update="in_backward",
        ),
    ]  # fmt: skip


def train_as_rank(ranks: Ranks, configuration: Configuration, num_steps: int) -> float:
    """Return the seconds of a step of this rank, the first not counted."""
    late = configuration.update == "late"
    kinds = store_kinds(STATES["adamw"][configuration.state], waits=late)
    decoder, store = build_store(configuration.config, kinds, owner=ranks.owner)
    optimizer = AdamW(learning_rate=1e-5, max_grad_norm=1.0 if late else None)
    batch = configuration.batch()
    with Engine(
        decoder,
        store,
        optimizer=optimizer,
        settings=configuration.settings,
        device=CpuDevice(copying=True),
        ranks=ranks,
    ) as engine:
        engine.step(batch)
        begin = time.perf_counter()
        for _ in range(num_steps):
            engine.step(batch)
        return (time.perf_counter() - begin) / num_steps


def network_as_rank(ranks: Ranks, profile: MachineProfile) -> Network:
    """Return what doctor finds between these ranks."""
    return measured_network(ranks, CpuDevice(copying=True), profile)


def measured_machines() -> dict[int, MachineProfile]:
    """Return this machine as it is now, by how many ranks are on it."""
    with tempfile.TemporaryDirectory() as scratch:
        profile = examine(Path(scratch), lambda said: None).profile
    return {
        size: profile.changed(network=run_ranks(size, network_as_rank, profile)[0])
        for size in SIZES
    }


def predicted(configuration: Configuration, machine: MachineProfile, size: int) -> Simulation:
    """Return the simulated step of one of `size` ranks on this host."""
    division = Division(per_host=size)
    workload = replace(configuration.workload, division=division)
    return simulate(as_rank(machine, division), workload, configuration.settings)


def measure_ranks(num_rounds: int, num_steps: int) -> dict[str, object]:
    """Return the figures with --ranks."""
    torch.set_num_threads(1)
    cases = [(size, each) for each in rank_configurations() for size in SIZES]
    ratios: dict[tuple[int, Configuration], list[float]] = {case: [] for case in cases}
    rows = []
    before = measured_machines()
    for number in range(num_rounds):
        took = {
            (size, each): max(run_ranks(size, train_as_rank, each, num_steps))
            for size, each in cases
        }
        after = measured_machines()
        for (size, each), measured in took.items():
            both = [predicted(each, machine[size], size) for machine in (before, after)]
            mean = statistics.mean(one.step_s for one in both)
            ratios[size, each].append(mean / measured)
            rows.append(
                {
                    "round": number,
                    "ranks": size,
                    "configuration": str(each),
                    "measured_s": round(measured, 3),
                    "predicted_s": round(mean, 3),
                    "limit": both[-1].bottleneck,
                    "between_gb_per_s": round(_rate(after[size]) / 1e9, 3),
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
        before = after
    medians = {case: statistics.median(found) for case, found in ratios.items()}
    errors = [abs(ratio - 1) for ratio in medians.values()]
    return {
        "cases": len(cases),
        "median": round(statistics.median(errors), 4),
        "worst": round(max(errors), 4),
        "ratios": {f"{size} ranks, {each}": round(r, 3) for (size, each), r in medians.items()},
        "rows": rows,
        "targets": RANKS_TARGETS,
    }


def _rate(machine: MachineProfile) -> float:
    assert machine.network is not None
    return machine.network.peer_bytes_per_s
