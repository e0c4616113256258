"""Ranks as threads of one process: what they say to each other stays in its memory.

    together = Together(3)
    results = together.run(lambda ranks: ...)      # one thread per rank; the results in rank order

A rank that fails breaks all waits, so that no other waits for it. Building and running a model
changes things that a process has one of (masks, attention, the generator): build models under
`ONE_AT_A_TIME`, and give engines the lanes of `in_turn`, which compute under it. Batches are laid
out under it in any case.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar
from unittest import mock

import torch
from torch import Tensor

from megatrain.engine.compute.inputs import Inputs, SentInputs
from megatrain.lanes.lane import Action, Lane
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import RankInfo, Ranks
from megatrain.step.ops import LANES, Op

Result = TypeVar("Result")
DEADLINE_S = 120.0
ONE_AT_A_TIME = threading.RLock()


class _InTurn(Lane):
    """A lane whose ops wait for no other rank, and are done one rank at a time."""

    def act(self, op: Op, action: Action) -> int:
        with ONE_AT_A_TIME:
            return super().act(op, action)


def in_turn() -> list[Lane]:
    """Return lanes for the CPU, for an engine of one of several ranks."""
    return [_InTurn(name) if name == "compute" else Lane(name) for name in LANES]


class Channel:
    """One communicator: all ranks give something, then all have what each gave."""

    def __init__(self, size: int) -> None:
        self._given: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def trade(self, rank: int, gives: Any, take: Callable[[list[Any]], Result]) -> Result:
        """Give, and take of what all give while none of it may change."""
        self._given[rank] = gives
        self.meet()
        taken = take(list(self._given))
        self.meet()
        return taken

    def meet(self) -> None:
        self._barrier.wait(DEADLINE_S)

    def abort(self) -> None:
        self._barrier.abort()


class Trades(Protocol):
    """A channel, or what takes its place."""

    def trade(self, rank: int, gives: Any, take: Callable[[list[Any]], Any]) -> Any: ...


class ThreadWire:
    """Fits megatrain.ranks.ranks.Wire."""

    def __init__(self, owner: Owner, channel: Trades) -> None:
        self._owner, self._channel = owner, channel
        self.num_bytes = 0
        """That came from others."""

    def gather(self, parts: Tensor) -> Any:
        mine = self._owner.rank

        def take(given: list[Any]) -> None:
            pairs = zip(parts.view(self._owner.size, -1), given, strict=True)
            for rank, (target, source) in enumerate(pairs):
                if rank != mine:
                    # A simulated device may do this late. Autograd counts writes, and minds one
                    # while it saves a tensor; a device's copies count when they are queued.
                    target.data.copy_(source)
                    self.num_bytes += target.nbytes

        return self._channel.trade(mine, parts.view(self._owner.size, -1)[mine], take)

    def exchange(
        self, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> Any:
        mine = self._owner.rank

        def take(given: list[Any]) -> None:
            targets = torch.split(received, list(num_received))
            for rank, (target, sources) in enumerate(zip(targets, given, strict=True)):
                target.data.copy_(sources[mine])
                self.num_bytes += 0 if rank == mine else target.nbytes

        return self._channel.trade(mine, torch.split(sent, list(num_sent)), take)


class ThreadCarrier:
    """Fits megatrain.ranks.ranks.Carrier."""

    def __init__(
        self, owner: Owner, channel: Channel, pairs: dict[tuple[int, int], Channel]
    ) -> None:
        self._owner, self._channel, self._pairs = owner, channel, pairs

    def send(self, data: Tensor, rank: int) -> None:
        self._pairs[self._owner.rank, rank].trade(0, data, lambda given: None)

    def receive(self, data: Tensor, rank: int) -> None:
        channel = self._pairs[rank, self._owner.rank]
        channel.trade(1, None, lambda given: data.copy_(given[0]))

    def agree(self, facts: RankInfo) -> list[RankInfo]:
        return self._channel.trade(self._owner.rank, json.dumps(facts), _read)


class ThreadRanks(Ranks):
    """Ranks of which each is a thread."""

    patience_s = DEADLINE_S

    def __init__(self, owner: Owner, channels: dict[str, Channel], pairs: Any) -> None:
        self.owner, self._channels = owner, channels
        self.wire = ThreadWire(owner, channels["wire"])
        self.carrier = ThreadCarrier(owner, channels["carrier"], pairs)

    def share(self, numbers: Sequence[float]) -> list[list[float]]:
        return self._channels["share"].trade(self.owner.rank, list(numbers), list)

    def agree(self, facts: RankInfo) -> list[RankInfo]:
        return self._channels["share"].trade(self.owner.rank, json.dumps(facts), _read)

    def fail(self, error: BaseException) -> None:
        for channel in self._channels.values():
            channel.abort()

    def close(self) -> None:
        pass


class Together:
    """All ranks of one process."""

    def __init__(self, size: int, *, level: bool = False) -> None:
        """`level`: no rank computes before all have laid out their batch.

        For devices: a rank that computes may wait for its device, and that for other ranks.
        """
        channels = {name: Channel(size) for name in ("wire", "share", "carrier", "level")}
        self._level = channels["level"] if level else None
        pairs = {(one, other): Channel(2) for one in range(size) for other in range(size)}
        self._channels = [*channels.values(), *pairs.values()]
        self.ranks = [ThreadRanks(Owner(rank, size), channels, pairs) for rank in range(size)]

    def run(self, work: Callable[[Ranks], Result]) -> list[Result]:
        """Do `work` as each rank at once; return their results. Raises what the first raised."""
        with (
            mock.patch.object(Inputs, "laid_out", self._in_turn(Inputs.laid_out)),
            ThreadPoolExecutor(len(self.ranks), thread_name_prefix="rank") as pool,
        ):
            futures = [pool.submit(self._guarded, work, ranks) for ranks in self.ranks]
            errors = [future.exception() for future in futures]
        causes = [e for e in errors if e is not None]
        own = [e for e in causes if not isinstance(e, threading.BrokenBarrierError)]
        if causes:
            first, *others = own or causes
            for other in others:
                first.add_note(f"another rank: {other!r}")
            raise first
        return [future.result() for future in futures]

    def _in_turn(self, lay_out: Callable[..., SentInputs]) -> Callable[..., SentInputs]:
        def laid_out(*args: Any, **options: Any) -> SentInputs:
            with ONE_AT_A_TIME:
                sent = lay_out(*args, **options)
            if self._level is not None:
                self._level.meet()
            return sent

        return laid_out

    def _guarded(self, work: Callable[[Ranks], Result], ranks: Ranks) -> Result:
        try:
            return work(ranks)
        except BaseException:
            for channel in self._channels:
                channel.abort()
            raise


def _read(given: list[Any]) -> list[RankInfo]:
    return [json.loads(text) for text in given]
