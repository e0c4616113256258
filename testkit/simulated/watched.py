"""Lets the simulator hear what host threads tell each other, and see what they touch.

Nothing in the package knows of it: the methods by which lanes hand work and progress to one another
are wrapped for the time of a test, and so are those that touch host memory without torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from megatrain.devices import device as devices
from megatrain.devices import pinning
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.engine import embedding_rows
from megatrain.engine.compute import inputs
from megatrain.engine.compute.front_and_tail import Edges
from megatrain.engine.updates import Optimizer
from megatrain.lanes.lane import Lane, Work
from megatrain.lanes.progress import Progress
from megatrain.memory.kinds import TensorKind
from megatrain.memory.tier.ring import TierRing
from megatrain.memory.tier.scratch_file import Tier
from megatrain.optim.views import Views
from megatrain.step.hazards import Ticket
from testkit.simulated.accelerator import Simulator
from testkit.simulated.clocks import Clock


class WatchedOptimizer:
    """An optimizer whose accesses the simulator sees: the kernel is not torch's."""

    def __init__(self, optimizer: Optimizer, simulator: Simulator) -> None:
        self._optimizer, self._simulator = optimizer, simulator
        self.states = optimizer.states
        self.treated = optimizer.treated

    def squared_norm(self, gradient: Tensor) -> float:
        self._simulator.touch(gradient, writes=False, what="norm")
        return self._optimizer.squared_norm(gradient)

    def clip_factor(self, norm: float) -> float:
        return self._optimizer.clip_factor(norm)

    def look_ahead(self, views: Views, gradient: Tensor, *, number: int, scale: float) -> None:
        for tensor in (gradient, *views.states):
            self._simulator.touch(tensor, writes=True, what="momentum")
        self._optimizer.look_ahead(views, gradient, number=number, scale=scale)

    def update(
        self, views: Views, gradient: Tensor, *, step: int, number: int, scale: float
    ) -> None:
        self._simulator.touch(gradient, writes=False, what="update")
        for tensor in (views.weight, views.lo, *views.states):
            if tensor is not None:
                self._simulator.touch(tensor, writes=True, what="update")
        self._optimizer.update(views, gradient, step=step, number=number, scale=scale)


class HeardLock:
    """A lock whose next holder has seen what the last one saw."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator, self._lock = simulator, threading.Lock()
        self._seen: Clock = {}

    def __enter__(self) -> None:
        self._lock.acquire()
        self._simulator.hear(self._seen)

    def __exit__(self, *_: object) -> None:
        self._seen = self._simulator.published()
        self._lock.release()


@contextmanager
def watched(simulator: Simulator) -> Iterator[None]:
    """Note what threads tell each other, and host accesses; the caller's thread is one of them."""
    told: dict[tuple[int, str, int], Clock] = {}
    seen: dict[tuple[int, str, int], Clock] = {}
    put: dict[int, tuple[Work, Clock]] = {}

    def key(progress: Progress, ticket: Ticket) -> tuple[int, str, int]:
        return id(progress), ticket.lane, ticket.number

    def issue(progress: Progress, ticket: Ticket) -> None:
        told[key(progress, ticket)] = simulator.published()
        original_issue(progress, ticket)

    def is_issued(progress: Progress, ticket: Ticket) -> bool:
        issued = original_is_issued(progress, ticket)
        if issued:
            simulator.hear(told[key(progress, ticket)])
        return issued

    def reap(progress: Progress, lane: str) -> None:
        before = list(progress._on_device[lane])
        original_reap(progress, lane)
        for ticket in before[: len(before) - len(progress._on_device[lane])]:
            seen[key(progress, ticket)] = simulator.published()

    def is_complete(progress: Progress, ticket: Ticket) -> bool:
        complete = original_is_complete(progress, ticket)
        if complete:
            simulator.hear(seen.get(key(progress, ticket), {}))
        return complete

    def put_work(lane: Lane, work: Work) -> None:
        put[id(work)] = (work, simulator.published())
        original_put(lane, work)

    def next_work(lane: Lane) -> Work | None:
        work = original_next(lane)
        if work is not None:
            simulator.hear(put.pop(id(work))[1])
        return work

    def join(lane: Lane, timeout_s: float) -> bool:
        ended = original_join(lane, timeout_s)
        if ended and lane._thread.ident is not None:
            simulator.thread_ended(lane._thread.ident)
        return ended

    def copy_bits(target: Tensor, source: Tensor) -> None:
        simulator.touch(source, writes=False, what="copy on the host")
        simulator.touch(target, writes=True, what="copy on the host")
        with simulator.bypassed:
            original_copy_bits(target, source)

    def gather_rows(target: Tensor, table: Tensor, ids: Tensor) -> None:
        simulator.touch(table, writes=False, what="gather")
        simulator.touch(target, writes=True, what="gather")
        with simulator.bypassed:
            original_gather(target, table, ids)

    def spread_rows(target: Tensor, rows: Tensor, ids: Tensor) -> None:
        simulator.touch(rows, writes=False, what="spread")
        simulator.touch(target, writes=True, what="spread")
        with simulator.bypassed:
            original_spread(target, rows, ids)

    def ask_host(edges: Edges, run: Any) -> Any:
        # Locked, because it places the random state back: queued work must not draw in between.
        with simulator.lock, simulator.bypassed:
            return original_ask_host(edges, run)

    def make_staging(ring: pinning.Ring, *arguments: Any) -> None:
        original_staging(ring, *arguments)
        vars(ring)["_lock"] = HeardLock(simulator)

    def make_ring(ring: TierRing, *arguments: Any) -> None:
        original_ring(ring, *arguments)
        for buffer in ring._buffers.values():
            simulator.watch("tier ring", buffer)

    def read(tier: Tier, block: int, parts: Mapping[TensorKind, Tensor]) -> int:
        return disk(original_read, tier, block, parts, writes=True)

    def write(tier: Tier, block: int, parts: Mapping[TensorKind, Tensor]) -> int:
        return disk(original_write, tier, block, parts, writes=False)

    def disk(
        move: Callable[..., int],
        tier: Tier,
        block: int,
        parts: Mapping[TensorKind, Tensor],
        *,
        writes: bool,
    ) -> int:
        for part in parts.values():
            simulator.touch(part, writes=writes, what="disk")
        with simulator.bypassed:
            return move(tier, block, parts)

    def pin(device: AcceleratorDevice, name: str, arena: Tensor) -> None:
        if simulator.region_of(arena) is None:
            simulator.watch(name, arena)
        original_pin(device, name, arena)

    original_issue, original_is_issued = Progress.issue, Progress.is_issued
    original_reap, original_is_complete = Progress._reap, Progress.is_complete
    original_put, original_next, original_join = Lane.put, Lane._next, Lane.join
    original_copy_bits, original_ask_host = devices.copy_bits, Edges._ask_host
    original_pin, original_ring = AcceleratorDevice.pin, TierRing.__init__
    original_staging = pinning.Ring.__init__
    original_read, original_write = Tier.read, Tier.write
    original_gather, original_spread = embedding_rows.gather_rows, embedding_rows.spread_rows
    with ExitStack() as stack:
        for owner, name, new in (
            (Progress, "issue", issue),
            (Progress, "is_issued", is_issued),
            (Progress, "_reap", reap),
            (Progress, "is_complete", is_complete),
            (Lane, "put", put_work),
            (Lane, "_next", next_work),
            (Lane, "join", join),
            (pinning, "copy_bits", copy_bits),
            (inputs, "copy_bits", copy_bits),
            (Edges, "_ask_host", ask_host),
            (AcceleratorDevice, "pin", pin),
            (pinning.Ring, "__init__", make_staging),
            (TierRing, "__init__", make_ring),
            (Tier, "read", read),
            (Tier, "write", write),
            (embedding_rows, "gather_rows", gather_rows),
            (embedding_rows, "spread_rows", spread_rows),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.enter_context(simulator.default)
        yield
