"""How long the host is busy in lane compute: it should not depend on the tokens of a micro-batch.

    python -m benchmarks.lane_time [--json]

A step of one micro-batch on testkit/host_gpu, with 1,024 and with 16,384 tokens in as many rows and
documents, in turns. The figure is the processor time of the lane's own thread, a median of rounds:
streams are other threads. In `head` logits go by chunks of 4,096 tokens, and so do its ops.

Prints for each model and form the milliseconds, 16k over 1k, and how often the host waited for the
device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatrain.devices.accelerator import accelerator
from megatrain.engine.engine import Engine
from megatrain.lanes.lane import Action, Lane
from megatrain.step.ops import Op, OpKind
from testkit.families import tiny_config
from testkit.host_gpu import control, module
from testkit.worlds import Case, Form, Sort, World, make_batch

FORMS: dict[str, Form] = {"packed": "flat", "padded": "padded"}
SHAPES = {1024: (32, 32), 16384: (32, 512)}
CASE = Case(sort="", steps=(), update="none")


@contextmanager
def lane_timed(seconds: defaultdict[str, float]) -> Iterator[None]:
    """Add up the processor time of lane compute, of the head and of all else."""
    act = Lane.act

    def timed(lane: Lane, op: Op, action: Action) -> int:
        begin = time.thread_time()
        moved = act(lane, op, action)
        if lane.name == "compute":
            part = "head" if op.kind is OpKind.HEAD else "layers"
            seconds[part] += time.thread_time() - begin
        return moved

    with mock.patch.object(Lane, "act", timed):
        yield


def measure(family: str, form: Form, rounds: int) -> dict[str, Any]:
    """Return the milliseconds by part and tokens, and the waits of steady steps."""
    world = World(Sort(config=lambda: tiny_config(family)))
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    device = accelerator("hostgpu")
    with world.engine(CASE, device=device) as engine:
        for tokens in SHAPES:
            _step(engine, form, tokens, 0)  # the first asks the device
        before = control.counters()["silent_waits"]
        module.set_sync_debug_mode("error")
        try:
            for number in range(rounds):
                for tokens in SHAPES:
                    seconds: defaultdict[str, float] = defaultdict(float)
                    with lane_timed(seconds):
                        _step(engine, form, tokens, number)
                    for part, spent in seconds.items():
                        found[part, tokens].append(1e3 * spent)
        finally:
            module.set_sync_debug_mode("default")
        waits = control.counters()["silent_waits"] - before
    few, many = SHAPES
    figures: dict[str, Any] = {"waits": waits}
    for part in ("layers", "head"):
        short, long = (statistics.median(found[part, tokens]) for tokens in (few, many))
        figures[part] = {
            "ms_1k": round(short, 2),
            "ms_16k": round(long, 2),
            "16k_over_1k": round(long / short, 3),
        }
    return figures


def _step(engine: Engine, form: Form, tokens: int, number: int) -> None:
    engine.step(make_batch((SHAPES[tokens],), seed=number, form=form))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = {
        f"{family}, {name}": measure(family, form, options.rounds)
        for family in ("llama", "gemma2")
        for name, form in FORMS.items()
    }
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, found in figures.items():
        for part in ("layers", "head"):
            few, many, ratio = found[part].values()
            print(f"{name:16} {part:7} {few:8.2f} ms {many:8.2f} ms  {ratio:5.2f}")
        print(f"{name:16} waits   {found['waits']}")


if __name__ == "__main__":
    main()
