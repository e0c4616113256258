"""Ranks on gloo: bytes on the wire, the wire against bare gloo, and what compute waits for it.

    python -m benchmarks.ranks [--json] [--ranks 2 4] [--layers 32] [--steps 2] [--rounds 3]

Processes of this machine, a small Llama in bf16, one micro-batch for each rank.

In a step each rank gets what others own of a block:

    once         for each fetch, by GATHER: layers twice, for forward and for backward, but for the
                 last `slots` of them, which are still in their slots at the turn; embedding and
                 head once
    once         of its gradient, by EXCHANGE, in the dtype of the weights; padding behind the last
                 param of a segment is left out

Parts are equal in a slot, so a part that is shorter, at the end of a segment, is sent with its
padding (`padding_bytes`, gathers alone). So the factor tends to 3 with the number of layers.

    wire_bytes               of a step, of all ranks, counted where tensors are handed to gloo
    bytes_by_law             by the law above, from the layout and nothing else; equal
    factor                   wire_bytes over the bytes of weights that others own
    factor_all_twice         the same if every block were fetched twice: 3, and the padding
    said_bytes               beside them: norms, losses and figures
    collectives_over_bare    seconds of a step's collectives through the wire, over the same sends
                             and receives given to gloo by hand, from and into the same memory;
                             nothing else runs; in turns, median of WIRE_ROUNDS: one takes a
                             fifth of a second, and three of them may say 1.2 for 1.0
    exposed_share            time that `compute` stood still because of lane `comm`, over the step;
                             the largest of the ranks, median of rounds

For the last one lanes are slowed down, as in benchmarks/overlap.py: `comm` by a bandwidth at which
to gather a layer takes GATHER_S; `in` and `out` by the same one; `compute` by a delay as long
as what `comm` does meanwhile: in forward a gather, in backward a gather and an exchange. There
communication can just be hidden. Steps are chained: each waits for the last one's updates.
`waited_share` is what compute waited for any lane.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from benchmarks.overlap import Model, build_model
from megatrain.devices.device import CpuDevice
from megatrain.engine.engine import Engine
from megatrain.lanes.lane import Lane
from megatrain.memory.layout import Layout
from megatrain.optim.adamw import AdamW
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import Ranks, Wire
from megatrain.step.ops import LANES, Op, OpKind
from testkit.engines import make_engine
from testkit.rank_processes import run_ranks
from testkit.slow_lane import SlowLane

GATHER_S = 0.08
"""Per layer: long beside what threads and small tensors cost, so that the schedule is measured.
What they cost makes compute longer than communication: see `compute_over_comm`."""
SLOTS = 3
WIRE_LAYERS, WIRE_HIDDEN = 8, 768
"""Of the model whose bytes are counted and moved: collectives of up to 14 MiB."""
WIRE_ROUNDS = 25
DEADLINE = timedelta(minutes=5)
TARGETS = {"collectives_over_bare": 1.1, "exposed_share": 0.05}

Call = tuple[str, list[Any]]
"""A collective of a step: its name and arguments, of which tensors are the engine's own memory."""


@dataclass(slots=True)
class Recorder:
    """Fits megatrain.ranks.ranks.Wire: another one's, whose calls are kept."""

    wire: Wire
    calls: list[Call] = field(default_factory=list)

    def gather(self, parts: Tensor) -> None:
        self.calls.append(("gather", [parts]))
        self.wire.gather(parts)

    def exchange(
        self, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        self.calls.append(("exchange", [received, sent, num_received, num_sent]))
        self.wire.exchange(received, sent, num_received, num_sent)


@contextmanager
def counted_sends() -> Iterator[Counter[Any]]:
    """Count the bytes that are handed to gloo, by group."""
    num_bytes: Counter[Any] = Counter()
    isend = dist.isend

    def counting(tensor: Tensor, **places: Any) -> Any:
        num_bytes[places["group"]] += tensor.nbytes
        return isend(tensor, **places)

    dist.isend = counting  # type: ignore[assignment]
    try:
        yield num_bytes
    finally:
        dist.isend = isend


def bytes_by_law(layout: Layout, *, all_twice: bool = False) -> Counter[str]:
    """Return what all ranks send to others in a step, in bytes, by what it is."""
    times, last, num_bytes = layout.owner.size - 1, layout.num_blocks - 1, Counter[str]()
    for segment in layout.segments:
        weights = segment.num_elements * segment.dtype.itemsize
        room = segment.gathered_elements * segment.dtype.itemsize
        fetches = 2 if all_twice or 0 < segment.block < last - SLOTS else 1
        num_bytes["owned_by_others"] += times * weights
        num_bytes["gathers"] += times * weights * fetches
        num_bytes["padding"] += times * (room - weights) * fetches
        last_place = layout.segment_places(segment)[-1]
        used = last_place.start + last_place.param.num_elements
        num_bytes["exchanges"] += times * used * segment.dtype.itemsize
    return num_bytes


def engine_of(model: Model, ranks: Ranks, lanes: list[Lane] | None = None) -> Engine:
    return make_engine(
        model.decoder,
        model.store,
        optimizer=AdamW(learning_rate=1e-5, max_grad_norm=1.0),
        update="in_backward",
        slots=SLOTS,
        device=CpuDevice(copying=True),
        ranks=ranks,
        lanes=lanes,
        trace=lanes is not None,
    )


def on_the_wire(ranks: Any, num_rounds: int) -> dict[str, Any]:
    """Return the bytes of a step, and of each round the seconds of both sides: one rank's part."""
    wire = ranks.wire
    recorder = ranks.wire = Recorder(wire)
    model = build_model(WIRE_LAYERS, WIRE_HIDDEN, ranks.owner)
    with engine_of(model, ranks) as engine:
        engine.step(model.batch)
        engine.settle()
        recorder.calls.clear()
        with counted_sends() as num_bytes:
            engine.step(model.batch)
            engine.settle()
        calls = list(recorder.calls)
        sides = {"wire": by_wire(calls, wire), "bare": by_hand(calls, ranks.owner)}
        moved = {name: moved_by(side) for name, side in sides.items()}
        seconds = [in_turns(sides, ranks, number) for number in range(num_rounds)]
    said = num_bytes.pop(dist.group.WORLD)
    return {
        "wire_bytes": sum(num_bytes.values()),
        "said_bytes": said,
        "law": bytes_by_law(model.store.layout),
        "twice": bytes_by_law(model.store.layout, all_twice=True),
        "moved": moved,
        "seconds": seconds,
    }


def moved_by(side: Callable[[], None]) -> int:
    """Return the bytes that a side hands to gloo, with nothing else under way."""
    with counted_sends() as num_bytes:
        side()
    return num_bytes.total()


def by_wire(calls: list[Call], wire: Wire) -> Callable[[], None]:
    def play() -> None:
        for name, values in calls:
            getattr(wire, name)(*values)

    return play


def by_hand(calls: list[Call], owner: Owner) -> Callable[[], None]:
    """Return the same bytes as bare sends and receives, on a group of their own."""
    group, ranks = dist.new_group(timeout=DEADLINE), range(owner.size)
    plays: list[tuple[list[Tensor], list[Tensor]]] = []
    for name, values in calls:
        if name == "gather":
            into = list(values[0].view(owner.size, -1))
            plays.append(([into[owner.rank]] * owner.size, into))
        else:
            received, sent, num_received, num_sent = values
            plays.append((list(sent.split(num_sent)), list(received.split(num_received))))

    def play() -> None:
        for going, coming in plays:
            works = [
                dist.irecv(coming[rank], group=group, group_src=rank)
                for rank in ranks
                if rank != owner.rank and len(coming[rank])
            ]
            works += [
                dist.isend(going[rank], group=group, group_dst=rank)
                for rank in ranks
                if rank != owner.rank and len(going[rank])
            ]
            if going[owner.rank] is not coming[owner.rank]:
                coming[owner.rank].copy_(going[owner.rank])
            for work in works:
                work.wait(DEADLINE)  # type: ignore[union-attr]

    return play


def in_turns(sides: dict[str, Callable[[], None]], ranks: Ranks, number: int) -> dict[str, float]:
    """Return the seconds of each side, begun by all ranks at once; who is first alternates."""
    seconds = {}
    for name in sorted(sides, reverse=number % 2 == 0):
        ranks.share([0.0])
        begin = time.perf_counter()
        sides[name]()
        seconds[name] = time.perf_counter() - begin
    return seconds


def throttled(ranks: Ranks, num_layers: int, num_steps: int) -> dict[str, float]:
    """Return what compute of one rank waited for, in seconds, and the seconds of all steps."""
    model = build_model(num_layers, owner=ranks.owner)
    with engine_of(model, ranks, slow_lanes(model.store.layout)) as engine:
        ranks.share([0.0])
        begin = time.perf_counter()
        for _ in range(num_steps):
            engine.step(model.batch)
        engine.settle()
        seconds = time.perf_counter() - begin
        assert engine.trace is not None
        waited: Counter[str] = Counter()
        for step in engine.trace.step_summaries():
            waited.update({kind.value: s for kind, s in step.compute_waited_s.items()})
        lanes = engine.trace.lane_summaries()
    return {
        **waited,
        "seconds": seconds,
        "comm": lanes["comm"].busy_s,
        "compute": lanes["compute"].busy_s,
    }


def slow_lanes(layout: Layout) -> list[Lane]:
    """Return lanes on which compute takes as long as what lane comm does meanwhile."""
    size, last = layout.owner.size, layout.num_blocks - 1
    moved = [layout.gathered_bytes(block) * (size - 1) // size for block in range(last + 1)]
    bandwidth = moved[1] / GATHER_S

    def compute_s(op: Op) -> float:
        assert op.block is not None
        both = op.block == last or (op.kind is OpKind.BACKWARD and op.block > 0)
        return moved[op.block] / bandwidth * (2 if both else 1)

    slow: dict[str, Any] = {name: {"bandwidth": bandwidth} for name in ("in", "comm", "out")}
    slow["compute"] = {"delay": compute_s}
    return [SlowLane(name, **slow.get(name, {})) for name in LANES]


def measure(size: int, num_layers: int, num_steps: int, num_rounds: int) -> dict[str, Any]:
    """Return the figures of that many ranks."""
    found = run_ranks(size, on_the_wire, WIRE_ROUNDS)
    law, twice = found[0]["law"], found[0]["twice"]
    wire_bytes = sum(one["wire_bytes"] for one in found)
    slowest = [
        {name: max(one["seconds"][number][name] for one in found) for name in ("wire", "bare")}
        for number in range(WIRE_ROUNDS)
    ]
    played = [run_ranks(size, throttled, num_layers, num_steps) for _ in range(num_rounds)]
    return {
        "ranks": size,
        "wire_bytes": wire_bytes,
        "bytes_by_law": law["gathers"] + law["padding"] + law["exchanges"],
        "padding_bytes": law["padding"],
        "factor": round(wire_bytes / law["owned_by_others"], 4),
        "factor_all_twice": round(
            (twice.total() - twice["owned_by_others"]) / twice["owned_by_others"], 4
        ),
        "said_bytes": sum(one["said_bytes"] for one in found),
        "wire_s": _median(side["wire"] for side in slowest),
        "bare_s": _median(side["bare"] for side in slowest),
        "collectives_over_bare": _median(side["wire"] / side["bare"] for side in slowest),
        "step_s": _median(ranks[0]["seconds"] / num_steps for ranks in played),
        "compute_over_comm": _median(ranks[0]["compute"] / ranks[0]["comm"] for ranks in played),
        "exposed_share": _median(max(map(_exposed, ranks)) for ranks in played),
        "waited_share": _median(max(map(_waited, ranks)) for ranks in played),
    }


def _exposed(rank: dict[str, float]) -> float:
    kinds = [kind.value for kind in OpKind if kind.spec.lane == "comm"]
    return sum(rank.get(kind, 0.0) for kind in kinds) / rank["seconds"]


def _waited(rank: dict[str, float]) -> float:
    return sum(rank.get(kind.value, 0.0) for kind in OpKind) / rank["seconds"]


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    figures = {
        "layers": options.layers,
        "steps": options.steps,
        "rounds": options.rounds,
        "by_ranks": [
            measure(size, options.layers, options.steps, options.rounds) for size in options.ranks
        ],
        "targets": TARGETS,
    }
    if options.json:
        print(json.dumps(figures))
        return
    for of_size in figures["by_ranks"]:
        for name, value in of_size.items():
            print(f"{name:24} {value}")


if __name__ == "__main__":
    from benchmarks import ranks  # its functions go to other processes by the name of a module

    ranks.main()
