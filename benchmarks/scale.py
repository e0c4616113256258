"""What is predicted at scale, as tables; docs/planner.md quotes one.

    python -m benchmarks.scale TABLE    machines, patience, limits, eight, workstations,
                                        failures or data

One GPU and several are simulated, as `megatrain estimate` does it: the engine's own schedule on a
virtual clock. Limits, failures and data are arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.tables import print_table
from megatrain.planning.catalog.asked_machines import find_machine
from megatrain.planning.catalog.known_models import find_known_model
from megatrain.planning.catalog.networks import find_network
from megatrain.planning.catalog.reference_machines import GIB, MACHINES
from megatrain.planning.estimate import estimate
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.ranks.division import Division
from megatrain.planning.ranks.sharing import as_rank
from megatrain.planning.search import Search
from megatrain.planning.simulate import Simulation, simulate
from megatrain.planning.workload import Workload
from megatrain.step.settings import StepSettings

HOME = 14
"""Bytes per param in host memory."""
SAVED = 12
"""Bytes per param in a checkpoint: weights, remainders, moments."""
ETHERNET = ("1GbE", "10GbE", "25GbE", "100GbE")
RESTART_S = 300.0
"""To notice, start processes and load a checkpoint."""
MICRO = 8192
"""Tokens of a micro-batch."""
LAYERS = 16
"""Of those that are alike: a step of all of them is as much longer in every lane."""
BATCH = 4 << 20
"""Tokens per step that large models are usually pre-trained with."""


def model_shape(name: str) -> ModelShape:
    return find_known_model(name).shape.renamed(name)


def short(name: str) -> str:
    return name.rpartition("/")[2].removesuffix("-Instruct").removesuffix("-Instruct-2407")


ONE_GPU = ("3090", "4090", "5090", "H100 SXM", "H200", "GH200")
MODELS = (
    "Qwen2.5-7B", "Qwen3-14B", "Qwen3-32B", "Llama-3.1-70B", "Mistral-Large-Instruct-2407",
    "gpt-oss-120b", "Qwen3-235B-A22B", "Llama-3.1-405B", "Kimi-K2-Instruct",
)  # fmt: skip


def machines() -> Iterator[str]:
    """Tokens/s of one GPU with steps of 128k tokens, if its host has the memory."""
    yield (
        f"{'model':17}{'GiB host':>9}"
        + "".join(f"{gpu:>9}" for gpu in ONE_GPU[:-1])
        + (f"{ONE_GPU[-1]:>7}")
    )
    for name in MODELS:
        shape = model_shape(name)
        planned = [_speed(shape, gpu) for gpu in ONE_GPU]
        speeds = ["-" if speed is None else f"{speed:,.0f}" for speed in planned]
        yield (
            f"{short(name)[:16]:17}{HOME * shape.params / GIB:>9,.0f}"
            + "".join(f"{speed:>9}" for speed in speeds[:-1])
            + f"{speeds[-1]:>7}"
        )


def patience() -> Iterator[str]:
    """How long one GPU takes for a number of tokens."""
    amounts = (10**7, 10**8, 10**9, 10**10, 10**12)
    yield f"{'model':15}{'machine':10}{'tokens/s':>9}" + "".join(
        f"{f'10^{len(str(amount)) - 1}':>9}" for amount in amounts
    )
    for name in ("Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Llama-3.1-70B"):
        for gpu in ("4090", "H100 SXM"):
            speed = _speed(model_shape(name), gpu)
            if speed is not None:
                times = "".join(f"{_time(amount / speed):>9}" for amount in amounts)
                yield f"{short(name):15}{gpu:10}{speed:>9,.0f}{times}"


def _speed(shape: ModelShape, gpu: str) -> float | None:
    """Return the planned tokens/s; None where device memory is too small for a block."""
    profile = find_machine(gpu)[0].profile(ram_bytes=64 << 40)
    workload = Workload(model=shape, step_tokens=128 << 10, packed=True)
    for micro_batch_tokens in (16384, 4096, 2048):
        settings = StepSettings(micro_batch_tokens=micro_batch_tokens, slots=2, tape="host")
        pins = dict.fromkeys(("micro_batch_tokens", "slots", "tape"), "as published")
        search = Search(profile, workload, settings, pins)
        found = search.best()
        if found is not None:
            return workload.step_tokens / found.step_s
    return None


def limits() -> Iterator[str]:
    """Tokens per step from which each resource hides behind the compute of a dense model."""
    yield (
        f"{'machine':17}{'TFLOP/s':>8}{'link GB/s':>11}{'DRAM GB/s':>11}"
        f"{'link':>9}{'unclipped':>11}{'clipped':>9}"
    )
    for machine in MACHINES:
        flops, dram = machine.sustained * 1e12, machine.dram_rate * 1e9
        link = f"{flops / machine.link_in / 1e9:,.0f}"
        early, late = 5 * flops / dram, 14 * flops / dram
        yield (
            f"{machine.name:17}{machine.sustained:>8.0f}{machine.link_in:>11.0f}"
            f"{machine.dram_rate:>11.0f}{link:>9}{early:>11,.0f}{late:>9,.0f}"
        )


def eight() -> Iterator[str]:
    """120B on one H200 and on eight in one host, by tokens per step; memory without a limit."""
    yield f"{'model':20}{'GPUs':>5}{'tokens/step':>13}{'step':>9}{'tokens/s':>10}{'limit':>11}"
    for name in ("Mistral-Large-Instruct-2407", "gpt-oss-120b"):
        for count in (1, 8):
            for step_tokens in (32 << 10, 128 << 10, 1 << 20):
                found = estimate(
                    name, gpu="H200", ram="64TB", gpus=count, batch_tokens=step_tokens
                ).plan
                yield (
                    f"{short(name):20}{count:>5}{step_tokens:>13,}{found.step_s:>7.1f} s"
                    f"{found.simulation.tokens_per_s:>10,.0f}{found.bottleneck:>11}"
                )


def workstations() -> Iterator[str]:
    """RTX 5090 workstations over Ethernet: what a step must be to keep them busy."""
    shape = model_shape("Llama-3.1-70B")
    alone = BATCH / _played(shape, 1, "10GbE", BATCH).step_s
    yield f"{short(shape.name)}, {HOME * shape.params / GIB:,.0f} GiB of memory in all hosts"
    yield (
        f"{'network':9}{'hosts':>7}{'GiB each':>10}{'tokens/step, 90 % busy':>24}"
        f"{'at 4M tokens/step':>19}{'limit':>9}"
    )
    for network in ETHERNET:
        for count in (8, 64, 1000):
            enough = 0.9 * count * alone
            needed = next(
                tokens
                for tokens in (count * MICRO << power for power in range(20))
                if tokens / _played(shape, count, network, tokens).step_s >= enough
            )
            played = _played(shape, count, network, BATCH)
            share = played.tokens_per_s / (count * alone)
            yield (
                f"{network:9}{count:>7,}{HOME * shape.params / count / GIB:>10,.1f}"
                f"{needed:>24,}{share:>17.0%}  {played.bottleneck:>9}"
            )


def _played(shape: ModelShape, hosts: int, network: str, step_tokens: int) -> Simulation:
    """Return a step on hosts with one RTX 5090 each, of the first layers in place of all."""
    division, between = Division(num_hosts=hosts), find_network(network)
    profile = as_rank(find_machine("5090")[0].profile(ram_bytes=64 << 40), division)
    if profile.network is not None:
        connected = replace(
            profile.network,
            host_bytes_per_s=between.bytes_per_s,
            host_latency_s=between.latency_s,
        )
        profile = profile.changed(network=connected)
    few = replace(shape, layer_kinds=shape.layer_kinds[:LAYERS])
    workload = Workload(model=few, step_tokens=step_tokens, packed=True, division=division)
    settings = StepSettings(micro_batch_tokens=MICRO, tape="host")
    return simulate(profile, workload, settings)


def failures() -> Iterator[str]:
    """Checkpoint time, time between failures, and what both cost."""
    yield "Assumed: a machine fails once a year, and a restart takes 5 minutes."
    yield (
        f"{'model':20}{'hosts':>6}{'save':>9}{'a failure every':>17}{'save every':>12}{'lost':>7}"
    )
    disk = 3e9
    for name in ("Qwen3-8B", "Llama-3.1-70B", "Llama-3.1-405B", "Kimi-K2-Instruct"):
        shape = model_shape(name)
        for count in (1, 8, 1000):
            if HOME * shape.params / count > 3 << 40:
                continue
            save = SAVED * shape.params / count / disk
            between = 365 * 86400 / count
            every = math.sqrt(2 * save * between)  # Young: saves and lost work in balance
            lost = save / every + (every / 2 + RESTART_S) / between
            yield (
                f"{short(name):20}{count:>6,}{_time(save):>9}{_time(between):>17}"
                f"{_time(every):>12}{lost:>7.2%}"
            )


def data() -> Iterator[str]:
    """What the data side holds, and what a position is, whatever the number of tokens."""
    import numpy as np

    from megatrain.data.steps.order import Permutation

    yield (
        f"{'tokens':>8}{'documents':>12}{'on disk':>10}{'tables in RAM':>16}"
        f"{'position':>10}{'row at half an epoch':>24}"
    )
    for power in (9, 10, 11, 12, 13):
        tokens = 10**power
        documents = tokens // 1000
        state = json.dumps({"epoch": 0, "window": documents // 4096 // 2, "row": 17})
        row = Permutation(documents, 42, 0)(np.array([documents // 2]))[0]
        yield (
            f"{f'10^{power}':>8}{documents:>12.0e}{_bytes(4 * tokens):>10}"
            f"{_bytes(16 * documents):>16}{len(state):>8} B{row:>24,}"
        )


def _time(seconds: float) -> str:
    for unit, name in ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s"


def _bytes(count: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:,.3g} {name}"
    return f"{count:,.0f} B"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "machines": machines,
    "patience": patience,
    "limits": limits,
    "eight": eight,
    "workstations": workstations,
    "failures": failures,
    "data": data,
}


if __name__ == "__main__":
    print_table(TABLES)
