"""Ranks as processes: torch.distributed behind `Ranks`.

    channel   group                        used by
    comm      gloo, or the device's own    lane comm: `wire`
    share     gloo                         the host lane and the caller of a step
    carry     gloo                         a save or an export, in whatever thread it runs
    pulse     gloo                         thread pulse: a sign of life of each rank, now and then

On gloo everything is sent and received straight from and into the caller's memory, with all ranks
at once; so a failure is of a pair of ranks, and the other one is known. Bytes that a rank keeps
are copied, not sent. On an accelerator the wire queues its backend's collectives on the stream.

The backend finds a rank that is lost: a connection closes, or nothing comes within the deadline.
A carrier waits without a deadline, because another rank may wait for its storage as long as that
takes. If a rank is silent meanwhile, the pulse misses it.

A call that waits for a lost rank may never return. So once one is lost the process has GRACE_S to
end by itself; then it is ended, with the reason on standard error.

Laws (tests/ranks/test_torch_ranks.py)
    1. All bytes arrive, whatever their number, and no byte beside them changes.
    2. Numbers and facts arrive exactly: every bit of a double, not-a-number included.
    3. Channels do not wait for each other: each may be used in its own thread.
    4. A call that fails, or waits beyond the deadline, raises RankLost, with the cause chained.
       The group is then closed: no later call can take bytes of an earlier one for its own.
    5. On `carry` a rank may wait for its storage as long as that takes. One that is silent or dead
       is found within the deadline all the same.
    6. A process that failed, or lost another rank, ends within GRACE_S, whatever its threads wait
       for.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatrain.errors import RankLost, printable
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import RankInfo, Ranks, Wire

FOREVER_S = 365 * 86400.0
PULSES = 10
"""Signs of life within the deadline."""
GRACE_S = 20.0
"""Time for a process that lost a rank to end by itself."""
PartsByRank = Mapping[int, Tensor]
"""Tensors that go to, or come from, each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One communicator. One thread at a time."""

    group: dist.ProcessGroup
    owner: Owner
    deadline_s: float
    lost: list[RankLost]
    """Why no call can be made any more; of all channels."""
    last: list[Any] = field(default_factory=list)
    """Sends and receives of the last call. To let go of them before the next ones are under way
    makes those slower: 20 swaps of 1 MiB took 68 ms, and 28 ms with the last ones kept."""

    @property
    def others(self) -> list[int]:
        """The other ranks, the next one first: not all begin with the same one."""
        rank, size = self.owner.rank, self.owner.size
        return [(rank + distance) % size for distance in range(1, size)]

    @contextmanager
    def losing(self, words: Callable[[], str]) -> Iterator[None]:
        """Turn what the backend raises into RankLost, which begins with `words`.

        Raises it at once if a call has failed before, on any channel.
        """
        if self.lost:
            raise RankLost(str(self.lost[0]))
        try:
            yield
        except RuntimeError as error:
            self.lost.append(_lost(f"{words()}: {plain_text(error)}"))
            raise self.lost[0] from error

    def swap(
        self,
        what: str,
        going: PartsByRank,
        coming: PartsByRank,
        meanwhile: Callable[[], object] = bool,
    ) -> None:
        """Send and receive at once, on gloo; return when all is done. Empty parts are skipped.

        What comes from a rank in two calls is in the order in which it was sent.
        """
        works: list[tuple[int, Any]] = []
        rank, ends = -1, time.monotonic() + self.deadline_s
        with self.losing(lambda: f"rank {rank} is dead, cut off or hangs ({what})"):
            for rank, part in coming.items():  # first: a send waits for the receive
                if part.numel():
                    works.append((rank, dist.irecv(part, group=self.group, group_src=rank)))
            for rank, part in going.items():
                if part.numel():
                    works.append((rank, dist.isend(part, group=self.group, group_dst=rank)))
            self.last[:] = works
            meanwhile()
            for rank, work in works:  # noqa: B007  (the error is of the rank at hand)
                left_s = max(0.001, ends - time.monotonic())  # 0 would mean the default
                work.wait(timedelta(seconds=left_s))

    def tell(self, what: str, own: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        """Return the elements of each rank: as many as `counts` says, or as `own` has."""
        size = self.owner.size
        counts = [len(own)] * size if counts is None else counts
        told = [own.new_empty(count) for count in counts]
        told[self.owner.rank] = own
        others = self.others
        self.swap(what, dict.fromkeys(others, own), {rank: told[rank] for rank in others})
        return told

    def agree(self, facts: RankInfo) -> list[RankInfo]:
        """Return the facts of each rank."""
        own = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
        counts = torch.cat(self.tell("agree", torch.tensor([len(own)]))).tolist()
        return [json.loads(bytes(text.numpy())) for text in self.tell("agree", own, counts)]


class GlooWire:
    """Fits megatrain.ranks.ranks.Wire: host memory."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def gather(self, parts: Tensor) -> None:
        channel = self._channel
        of_rank = parts.view(channel.owner.size, -1)
        going = dict.fromkeys(channel.others, of_rank[channel.owner.rank])
        channel.swap("gather", going, {rank: of_rank[rank] for rank in channel.others})

    def exchange(
        self, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        channel, rank = self._channel, self._channel.owner.rank
        to, of = torch.split(sent, list(num_sent)), torch.split(received, list(num_received))
        going = {other: to[other] for other in channel.others}
        coming = {other: of[other] for other in channel.others}
        channel.swap("exchange", going, coming, partial(of[rank].copy_, to[rank]))


class DeviceWire:
    """Fits megatrain.ranks.ranks.Wire: memory of an accelerator, by its own backend.

    Calls return once they are queued on the stream; the backend ends the process if a collective
    takes longer than the deadline.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def gather(self, parts: Tensor) -> None:
        channel = self._channel
        own = parts.view(channel.owner.size, -1)[channel.owner.rank]
        with channel.losing(lambda: "gather failed"):
            dist.all_gather_into_tensor(parts, own, group=channel.group)

    def exchange(
        self, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        with self._channel.losing(lambda: "exchange failed"):
            dist.all_to_all_single(
                received, sent, list(num_received), list(num_sent), group=self._channel.group
            )


class GlooCarrier:
    """Fits megatrain.ranks.ranks.Carrier."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def send(self, data: Tensor, rank: int) -> None:
        self._channel.swap(f"send to rank {rank}", {rank: data}, {})

    def receive(self, data: Tensor, rank: int) -> None:
        self._channel.swap(f"receive from rank {rank}", {}, {rank: data})

    def agree(self, facts: RankInfo) -> list[RankInfo]:
        return self._channel.agree(facts)


class TorchRanks(Ranks):
    """Ranks that joined each other (`init_distributed` in megatrain/ranks/launcher.py)."""

    def __init__(self, owner: Owner, device: str, deadline_s: float) -> None:
        """Make the groups: all ranks do so at once. Torch's default group, on gloo, is one."""
        self.owner = owner
        self.patience_s = deadline_s
        self._lost: list[RankLost] = []

        def channel(backend: str = "gloo", limit_s: float = deadline_s) -> Channel:
            group = dist.new_group(timeout=timedelta(seconds=limit_s), backend=backend)
            return Channel(group=group, owner=owner, deadline_s=limit_s, lost=self._lost)

        backend = dist.get_default_backend_for_device(torch.device(device).type)
        comm = channel(backend)
        self.wire: Wire = GlooWire(comm) if backend == "gloo" else DeviceWire(comm)
        assert dist.group.WORLD is not None, "joined"
        self._share = Channel(
            group=dist.group.WORLD, owner=owner, deadline_s=deadline_s, lost=self._lost
        )
        self.carrier = GlooCarrier(channel(limit_s=FOREVER_S))
        self._pulse, self._leaves = channel(), threading.Event()
        self._beats = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._beats.start()

    def share(self, numbers: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(list(numbers), dtype=torch.float64)
        told: list[Any] = [part.tolist() for part in self._share.tell("share", own)]
        return told

    def agree(self, facts: RankInfo) -> list[RankInfo]:
        return self._share.agree(facts)

    def fail(self, error: BaseException) -> None:
        end_after(GRACE_S, error)
        self._lost.append(RankLost(f"this rank failed: {error}"))

    def close(self) -> None:
        self._leaves.set()
        if not self._lost:  # else some rank may not leave as the others do
            self._beats.join()
        dist.destroy_process_group()

    def _beat(self) -> None:
        """Be thread pulse, until all ranks leave or one is lost."""
        with suppress(RankLost):  # this process ends: see _lost
            while not all(self._pulse.tell("pulse", torch.tensor([self._leaves.is_set()]))):
                self._leaves.wait(self.patience_s / PULSES)


def _lost(cause: str) -> RankLost:
    """Return the error that ends this process because of another rank."""
    error = RankLost(
        f"{printable(cause)}\n  Every rank ends, and the one that failed first has the reason in "
        "its log. Start the same command again: the run resumes from its last checkpoint."
    )
    end_after(GRACE_S, error)
    return error


def end_after(seconds: float, error: BaseException) -> threading.Timer:
    """End this process with an error after some seconds, unless that is canceled before."""

    def end() -> None:
        os.write(sys.stderr.fileno(), f"{type(error).__name__}: {error}\n".encode())
        os._exit(getattr(error, "exit_code", 1))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def plain_text(error: BaseException) -> str:
    """Return the message of a backend's error, without its place in the source and its advice."""
    line = str(error).partition("\n")[0].partition(" This is typically caused")[0]
    return re.sub(r"^\[[^\]]*:\d+\] ", "", line)
