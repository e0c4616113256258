"""Masters and moments on disk: step time against compute and the raw disk, and memory.

    python -m benchmarks.disk_tier [--json] [--rounds 3] [--steps 1] [--speed | --memory]

Run it in a folder on the disk to measure: the scratch files are made there, without a name.

Speed. The lanes play steps of a model of 160M parameters whose reads, writes, hashes, norms and
updates are real, and whose compute is a sleep: forward takes a quarter of it, backward the rest. On
these cores real compute would take time from hashes and updates, which no accelerator's does, and
the figure would be about cores. In turns, each the seconds of a step in the middle of a run:

    memory_s           everything in host memory
    disk_s             a loop that reads and writes the same bytes in the order of the disk lane, in
                       pieces of the same size from as many threads, and does nothing else; once
                       before the steps and once behind them, the mean of both
    step_s             with the tier
    over_bound         step_s over the longer of the two, median of rounds

Compute takes 0.1 x disk_s (the disk limits the step), 4 x (compute does) and 1 x.

    step_over_bound    the worst with 0.1 x and 4 x

Late updates can use the disk only while forward computes, updates in backward only while backward
does, apart from what the ring holds. So 1 x is beyond what any schedule with these updates can
hide; `least_over_bound` says what such a one could reach, without the ring.

Memory. A Llama of 800M in a process of its own, two real steps.

    ledger_over_resident    the ledger's host total over the most that was resident
    store_per_param         resident bytes per parameter without what the ledger names beside the
                            store: rings, gradient slots, working memory, Python
    ring_mib                the rings between disk and updates, and those of gradients
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.plan.configurations import Configuration, plain_profile
from benchmarks.plan.memory import GIVING_BACK, measure_memory
from megatrain import files
from megatrain.batch import StepPart
from megatrain.devices.device import CpuDevice
from megatrain.engine.actions import StepActions
from megatrain.engine.machine import build_machine
from megatrain.lanes.lane import Action
from megatrain.lanes.player import Player
from megatrain.lanes.trace import Trace
from megatrain.memory.kinds import Kind, kinds_on_disk
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.memory.tier.scratch_file import TIER_CHUNK_BYTES, TIER_THREADS, Tier, TierRegions
from megatrain.models.build import build_decoder
from megatrain.optim.adamw import AdamW
from megatrain.optim.states import WITH_CLIP, WITHOUT_CLIP
from megatrain.planning.memory.predicted import predicted_ledger, store_lines
from megatrain.step.ops import Op, OpKind
from megatrain.step.schedule import build_step

TARGETS = {"step_over_bound": 1.1, "ledger_over_resident": 0.03}
MODEL: dict[str, Any] = {"hidden": 1024, "inner": 2816, "layers": 12, "vocab": 8192}
LARGE: dict[str, Any] = {"hidden": 1792, "inner": 6144, "layers": 16, "vocab": 32000, "length": 64}
MODES: list[dict[str, Any]] = [
    {"update": "in_backward", "tier": "states"},
    {"update": "late", "tier": "states"},
]
SHARES = (0.1, 4.0, 1.0)
"""Compute over the raw disk."""
FORWARD = 0.25
"""Of compute: backward recomputes, and does twice the work of forward."""
KNOWN = tuple(kind for kind in OpKind if kind.spec.ends_step)
Move = tuple[OpKind, int, int]
"""Kind of op, block, bytes."""


class Steps:
    """Steps on lanes, one after the other: all real but compute."""

    def __init__(self, case: Configuration) -> None:
        late = case.update == "late"
        kinds = WITH_CLIP if late else WITHOUT_CLIP
        decoder = build_decoder(case.config, "bf16")
        layout = build_layout(decoder.blocks, kinds)
        on_disk = kinds_on_disk(kinds, case.tier)
        tier = Tier(Path(), TierRegions(layout, on_disk)) if on_disk else None
        self._store = Store(layout, tier)
        shape = case.settings.shape(num_blocks=len(decoder.blocks), copying=False)
        device, optimizer = CpuDevice(), AdamW(learning_rate=1e-5, max_grad_norm=1.0)
        machine = build_machine(decoder, self._store, device, shape, optimizer, case.settings)
        nothing = StepPart.whole([])
        self._trace = Trace()
        self._player = Player(device.lanes(), trace=self._trace)
        self._real = StepActions(machine, nothing, 1).table()
        self._first, self._next = build_step(shape), build_step(shape, pending=late)
        self._num_forward = sum(op.kind is OpKind.FORWARD for op in self._first)
        if Kind.GRAD in kinds and Kind.GRAD not in on_disk:
            self._store.arena(Kind.GRAD).view(torch.bfloat16).fill_(1e-3)

    def begin(self) -> None:
        """Take the first step, which has no updates on top, and one like all others."""
        self._play(self._first, 0.0)
        self._play(self._next, 0.0)

    def seconds(self, num_steps: int, compute_s: float) -> float:
        """Return the seconds from the end of a step to that of the next."""
        self._play(self._next, compute_s)
        start = time.perf_counter()
        for _ in range(num_steps):
            self._play(self._next, compute_s)
        return (time.perf_counter() - start) / num_steps

    def moves(self) -> list[Move]:
        """Return what the disk lane did in the last step."""
        self._player.settle()
        spans = [s for s in self._trace.spans if s.lane == "disk" and s.awaited is None]
        last = max(span.step for span in spans)
        return [(s.op.kind, s.op.block or 0, s.num_bytes) for s in spans if s.step == last]

    def close(self) -> None:
        self._player.settle()
        self._player.close()
        self._store.close()

    def _play(self, ops: list[Op], compute_s: float) -> None:
        forward_s = FORWARD * compute_s / self._num_forward
        backward_s = (1 - FORWARD) * compute_s / (self._num_forward + 1)
        slept: dict[OpKind, Action] = {
            OpKind.FORWARD: lambda op: time.sleep(forward_s),
            OpKind.HEAD: lambda op: time.sleep(backward_s),
            OpKind.BACKWARD: lambda op: time.sleep(backward_s),
            OpKind.DRAIN: lambda op: None,
        }
        self._player.play(ops, self._real | slept).wait(*KNOWN)


def measure_speed(
    num_rounds: int, num_steps: int, model: dict[str, Any] = MODEL
) -> list[dict[str, Any]]:
    """Return the figures of all modes."""
    rows = []
    for mode in MODES:
        case = Configuration(**model, **mode)
        plain, tiered = Steps(replace(case, tier="none")), Steps(case)
        for steps in (plain, tiered):
            steps.begin()
        with raw_disk(tiered.moves()) as move:
            for share in SHARES:
                rows.append({"mode": f"{case.update}, {case.tier}", "compute_over_disk": share})
                rows[-1] |= _in_turns(plain, move, tiered, share, num_rounds, num_steps)
                rows[-1]["least_over_bound"] = _least_over_bound(share, late=case.update == "late")
                print(rows[-1], file=sys.stderr, flush=True)
        for steps in (plain, tiered):
            steps.close()
    return rows


def _in_turns(
    plain: Steps,
    move: Callable[[], float],
    tiered: Steps,
    share: float,
    num_rounds: int,
    num_steps: int,
) -> dict[str, float]:
    found, compute_s = [], share * move()
    for _ in range(num_rounds):
        memory_s = plain.seconds(num_steps, compute_s)
        before_s = move()
        step_s = tiered.seconds(num_steps, compute_s)
        found.append((memory_s, (before_s + move()) / 2, step_s))
    ratios = [step_s / max(memory_s, disk_s) for memory_s, disk_s, step_s in found]
    names = ("memory_s", "disk_s", "step_s")
    medians = map(statistics.median, zip(*found, strict=True))
    times = {name: round(value, 3) for name, value in zip(names, medians, strict=True)}
    return times | {"over_bound": round(statistics.median(ratios), 3)}


def _least_over_bound(share: float, *, late: bool) -> float:
    """Return what a schedule without a ring could reach: the disk works in one phase of the two."""
    beside = share * (FORWARD if late else 1 - FORWARD)
    return round((max(beside, 1.0) + share - beside) / max(share, 1.0), 3)


@contextmanager
def raw_disk(moves: list[Move]) -> Iterator[Callable[[], float]]:
    """Yield a function that makes the moves in a file of its own, and returns its seconds."""
    size = max(num_bytes for _, _, num_bytes in moves)
    memory = memoryview(mmap.mmap(-1, size))
    memory[:] = os.urandom(size)
    path = Path(f"raw-{os.getpid()}")
    fd, _ = files.open_direct(path, os.O_RDWR | os.O_CREAT)
    path.unlink()
    os.posix_fallocate(fd, 0, size * (1 + max(block for _, block, _ in moves)))
    with ThreadPoolExecutor(TIER_THREADS) as pool:

        def piece(kind: OpKind, offset: int, start: int, stop: int) -> None:
            call = os.preadv if kind is OpKind.READ else os.pwritev
            assert call(fd, [memory[start:stop]], offset + start) == stop - start

        def move() -> float:
            begin = time.perf_counter()
            for kind, block, num_bytes in moves:
                starts = range(0, num_bytes, TIER_CHUNK_BYTES)
                stops = [min(start + TIER_CHUNK_BYTES, num_bytes) for start in starts]
                offset, count = block * size, len(stops)
                list(pool.map(piece, [kind] * count, [offset] * count, starts, stops))
            return time.perf_counter() - begin

        move()  # a file that was only reserved reads as zeros, without a visit to the disk
        yield move
    os.close(fd)


def measure_tier_memory() -> list[dict[str, Any]]:
    """Return what was resident, against the ledger."""
    cases = [Configuration(**LARGE, **mode) for mode in MODES]
    rows = measure_memory(cases, GIVING_BACK)["rows"]
    assert isinstance(rows, list)
    return [_memory_row(case, row) for case, row in zip(cases, rows, strict=True)]


def _memory_row(case: Configuration, row: dict[str, Any]) -> dict[str, Any]:
    measured = row["measured_mib"] * 2**20
    settings, workload = case.settings, case.workload
    in_memory = [line for line in store_lines(workload, settings) if line.place == "host"]
    store = sum(line.num_bytes for line in in_memory)
    lines = predicted_ledger(plain_profile(0), workload, settings).lines
    rings = sum(line.num_bytes for line in lines if "ring" in line.purpose)
    beside = row["predicted_mib"] * 2**20 - store
    return {
        "mode": f"{case.update}, {case.tier}",
        "params": row["params"],
        "resident_mib": row["measured_mib"],
        "ledger_over_resident": row["ratio"],
        "store_per_param": round((measured - beside) / row["params"], 3),
        "ring_mib": round(rings / 2**20, 1),
    }


def measure(num_rounds: int, num_steps: int, *, speed: bool, memory: bool) -> dict[str, Any]:
    """Return all figures, or those that are asked for."""
    figures: dict[str, Any] = {}
    if speed:
        rows = measure_speed(num_rounds, num_steps)
        limited = [row["over_bound"] for row in rows if row["compute_over_disk"] != 1]
        figures |= {"step_over_bound": max(limited), "speed": rows}
    if memory:
        rows = measure_tier_memory()
        errors = [abs(row["ledger_over_resident"] - 1) for row in rows]
        figures |= {"ledger_over_resident": max(errors), "memory": rows}
    return figures | {"targets": TARGETS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--speed", action="store_true", help="step times alone")
    parser.add_argument("--memory", action="store_true", help="resident bytes alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(
        options.rounds,
        options.steps,
        speed=options.speed or not options.memory,
        memory=options.memory or not options.speed,
    )
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
