"""Copies behind compute: the step time that overlapping lanes reach, against the least possible.

    python -m benchmarks.overlap [--json] [--late] [--layers 32] [--steps 3] [--rounds 3]

A small Llama in copying mode, its tape on the host, played by the lanes and by the reference (one
op at a time) in turns. All lanes are slowed down: `in` and `out` by a bandwidth, at which to fetch
a block takes FETCH_S per layer; `compute` by a delay, which is as long as the block's fetch in
forward, three times as long in backward (recompute, and twice forward), three times for the head.
That is the point where copies can just be hidden; below it they cannot, above it it is easy.

The delays are sleeps. On this many cores real compute and real copies would take cores from each
other, which no accelerator's do, and the figure would be about cores. The real tensors are small:
what they cost, and what the lanes' own threads cost, counts against us.

    efficiency               bound_s / step_s, median of rounds
      bound_s                the busiest lane: the time of its ops in a step, each measured in the
                             reference, where nothing disturbs it; no step can take less
      step_s                 from the first call of step to the end of the last update, over the
                             number of steps: chained, so each must wait for the last one's updates
    serial_over_overlapped   the reference's step time over step_s, median of rounds

With --late gradients wait for the global norm, and the host lane is slowed down too: updates take
half as long as forward. Step t's updates run in step t+1.

    exposed_share            time that `compute` stood still because of an update in the end (a
                             fetch that waits for an update counts), from the trace, over the time
                             of all updates; median of rounds; the first step has none and is left
                             out
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaConfig

from megatrain.batch import MicroBatch
from megatrain.devices.device import CpuDevice
from megatrain.lanes.lane import Lane
from megatrain.lanes.trace import Trace
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Decoder
from megatrain.optim.adamw import AdamW
from megatrain.optim.states import WITH_CLIP
from megatrain.ranks.ownership import SOLE, Owner
from megatrain.step.ops import Op, OpKind
from megatrain.step.shape import Update
from testkit.engines import make_engine
from testkit.slow_lane import SlowLane

FETCH_S = 0.02
"""Per layer: long beside what threads and small tensors cost, so that the schedule is measured."""
VOCABULARY = 256

TARGETS = {"efficiency": 0.95, "serial_over_overlapped": 1.6}
LATE_TARGETS = {"exposed_share": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What both players play with."""

    decoder: Decoder
    store: Store
    batch: Sequence[MicroBatch]

    @property
    def bandwidth(self) -> float:
        """Bytes per second at which a layer takes FETCH_S."""
        return self.block_bytes(1) / FETCH_S

    def block_bytes(self, block: int) -> int:
        return self.store.block_bytes(block, TensorKind.HI).nbytes

    def forward_s(self, block: int) -> float:
        return self.block_bytes(block) / self.bandwidth

    def lanes(self, *, late: bool) -> list[Lane]:
        def compute_s(op: Op) -> float:
            assert op.block is not None
            return self.forward_s(op.block) * (1 if op.kind is OpKind.FORWARD else 3)

        def update_s(op: Op) -> float:
            return 0.0 if op.block is None else self.forward_s(op.block) / 2

        return [
            SlowLane("in", bandwidth=self.bandwidth),
            SlowLane("compute", delay=compute_s),
            SlowLane("out", bandwidth=self.bandwidth),
            SlowLane("host", delay=update_s if late else None),
        ]


def build_model(num_layers: int, hidden_size: int = 128, owner: Owner = SOLE) -> Model:
    """Return a model of which `owner` has its part, and a batch with a micro-batch for each."""
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    decoder = build_decoder(config, "bf16")
    store = Store(build_layout(decoder.blocks, WITH_CLIP, owner))
    generator = torch.Generator().manual_seed(0)
    for param in decoder.params:
        store.param(param.name, TensorKind.HI).normal_(0.0, 0.02, generator=generator)
    ids = torch.randint(0, VOCABULARY, (1, 8), generator=generator)
    batch = [MicroBatch(input_ids=ids, labels=ids)] * owner.size
    return Model(decoder=decoder, store=store, batch=batch)


def play(model: Model, num_steps: int, *, update: Update, reference: bool) -> tuple[float, Trace]:
    """Return the seconds per step and the trace of `num_steps` chained steps."""
    engine = make_engine(
        model.decoder,
        model.store,
        optimizer=AdamW(learning_rate=1e-5, max_grad_norm=1.0),
        update=update,
        device=CpuDevice(copying=True),
        tape="host",
        lanes=model.lanes(late=update == "late"),
        reference=reference,
        trace=True,
    )
    with engine:
        begin = time.perf_counter()
        for _ in range(num_steps):
            engine.step(model.batch)
        engine.synchronize()
        seconds = time.perf_counter() - begin
    assert engine.trace is not None
    return seconds / num_steps, engine.trace


def measure(num_layers: int, num_steps: int, num_rounds: int) -> dict[str, object]:
    """Return the figures without --late."""
    model = build_model(num_layers)
    bounds, serials, overlaps = [], [], []
    for _ in range(num_rounds):
        serial_s, trace = play(model, num_steps, update="in_backward", reference=True)
        busy_s = [lane.busy_s / num_steps for lane in trace.lane_summaries().values()]
        bounds.append(max(busy_s))
        serials.append(serial_s)
        overlaps.append(play(model, num_steps, update="in_backward", reference=False)[0])
    return {
        "layers": num_layers,
        "steps": num_steps,
        "rounds": num_rounds,
        "bound_s": _median(bounds),
        "step_s": _median(overlaps),
        "serial_step_s": _median(serials),
        "efficiency": _median_ratio(bounds, overlaps),
        "serial_over_overlapped": _median_ratio(serials, overlaps),
        "targets": TARGETS,
    }


def measure_late(num_layers: int, num_steps: int, num_rounds: int) -> dict[str, object]:
    """Return the figures with --late."""
    model = build_model(num_layers)
    exposed, updates = [], []
    for _ in range(num_rounds):
        _, trace = play(model, num_steps + 1, update="late", reference=False)
        steps = trace.step_summaries()[1 : num_steps + 1]
        exposed.append(sum(step.compute_waited_s.get(OpKind.UPDATE, 0.0) for step in steps))
        updates.append(
            sum(
                span.seconds
                for span in trace.spans
                if span.op.kind is OpKind.UPDATE
                and span.awaited is None
                and 1 <= span.step <= num_steps
            )
        )
    return {
        "layers": num_layers,
        "steps": num_steps,
        "rounds": num_rounds,
        "update_s": round(statistics.median(updates) / num_steps, 4),
        "exposed_s": round(statistics.median(exposed) / num_steps, 4),
        "exposed_share": _median_ratio(exposed, updates),
        "targets": LATE_TARGETS,
    }


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 4)


def _median_ratio(above: list[float], below: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(above, below, strict=True)), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--late", action="store_true", help="updates behind the next forward")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = (measure_late if options.late else measure)(
        options.layers, options.steps, options.rounds
    )
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
