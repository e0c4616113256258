"""Ranks as processes: torch.distributed behind `Ranks`.

    channel   group                        used by
    comm      gloo, or the device's own    lane comm: `wire`
    share     gloo                         the host lane and the caller of a step
    carry     gloo                         a save or an export, in whatever thread it runs

On gloo everything is sent and received straight from and into the caller's memory, with all ranks
at once; so a failure is of a pair of ranks, and the other one is known. Bytes that a rank keeps
are copied, not sent. On an accelerator the wire queues its backend's collectives on the stream.

Laws (tests/ranks/test_torch_ranks.py)
    1. All bytes arrive, whatever their number, and no byte beside them changes.
    2. Numbers and facts arrive exactly: every bit of a double, not-a-number included.
    3. Channels do not wait for each other: each may be used in its own thread.
    4. A call that fails, or waits beyond the deadline, raises RankLost, with the cause chained.
       The group is then closed: no later call can take bytes of an earlier one for its own.
    5. On `carry`, time in which a rank waits for its storage does not count for the deadline. A
       rank that is silent or dead is found within it all the same.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatrain.errors import RankLost
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import Ranks, Said, Wire

FOREVER = timedelta(days=365)
POLLS = 20
"""Looks at the other ranks within the deadline."""
MOST_POLL_S = 1.0
PartsByRank = Mapping[int, Tensor]
"""Tensors that go to, or come from, each rank."""


class NoAnswer(Exception):
    """A send to, or a receive from, one rank failed; the backend's error is its cause."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(f"rank {rank}: {plain_text(error)}")
        self.rank = rank
        self.__cause__ = error


class Watcher(Protocol):
    """Watches the other ranks."""

    def begin(self, channel: str, doing: str) -> None:
        """Take note that this rank begins something on a channel. Called by any thread."""

    def storing(self, call: str | None) -> None:
        """Let the others know that this rank waits for a file call, or no longer."""

    def is_storing(self) -> bool:
        """Return whether another rank waits for a file call. Raises RankLost if one is lost."""

    def diagnose(self, error: BaseException) -> RankLost:
        """Return the rank to blame for `error`: a NoAnswer, or an error of the backend."""

    def fail(self, error: BaseException) -> None:
        """Let the others know why this rank ends."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One communicator. One thread at a time."""

    name: str
    group: dist.ProcessGroup
    owner: Owner
    deadline_s: float
    watcher: Watcher
    waiter: Waiter | None = None
    """The waiter of a channel on which ranks are patient with one that waits for its storage."""
    last: list[Any] = field(default_factory=list)
    """Sends and receives of the last call. To let go of them before the next ones are under way
    makes those slower: 20 swaps of 1 MiB took 68 ms, and 28 ms with the last ones kept."""

    @property
    def others(self) -> list[int]:
        """The other ranks, the next one first: not all begin with the same one."""
        rank, size = self.owner.rank, self.owner.size
        return [(rank + distance) % size for distance in range(1, size)]

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Turn what the backend raises into RankLost."""
        self.watcher.begin(self.name, what)
        try:
            yield
        except (NoAnswer, RuntimeError) as error:
            raise self.watcher.diagnose(error) from error

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
        rank = -1
        wait_for = self._waits() if self.waiter is None else self._waits_patiently(self.waiter)
        with self.doing(what):
            try:
                for rank, part in coming.items():  # first: a send waits for the receive
                    if part.numel():
                        works.append((rank, dist.irecv(part, group=self.group, group_src=rank)))
                for rank, part in going.items():
                    if part.numel():
                        works.append((rank, dist.isend(part, group=self.group, group_dst=rank)))
                self.last[:] = works
                meanwhile()
                for rank, work in works:  # noqa: B007  (the error is of the rank at hand)
                    wait_for(work)
            except RuntimeError as error:
                raise NoAnswer(rank, error) from error

    def _waits(self) -> Callable[[Any], None]:
        """Return a function that waits for sends and receives, for the deadline in all."""
        ends = time.monotonic() + self.deadline_s

        def wait_for(work: Any) -> None:
            left_s = max(0.001, ends - time.monotonic())  # 0 would mean the default
            work.wait(timedelta(seconds=left_s))

        return wait_for

    def _waits_patiently(self, waiter: Waiter) -> Callable[[Any], None]:
        """Return one that does not count time in which a rank is storing."""
        poll_s = min(MOST_POLL_S, self.deadline_s / POLLS)
        left_s = self.deadline_s

        def wait_for(work: Any) -> None:
            nonlocal left_s
            done = waiter.begin(lambda: work.wait(FOREVER))
            while not wait([done], poll_s).done:
                left_s -= 0.0 if self.watcher.is_storing() else poll_s
                if left_s < 0:
                    raise RuntimeError(f"no answer within {self.deadline_s:g} s")
            done.result()

        return wait_for

    def tell(self, what: str, own: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        """Return the elements of each rank: as many as `counts` says, or as `own` has."""
        size = self.owner.size
        counts = [len(own)] * size if counts is None else counts
        told = [own.new_empty(count) for count in counts]
        told[self.owner.rank] = own
        others = self.others
        self.swap(what, dict.fromkeys(others, own), {rank: told[rank] for rank in others})
        return told

    def agree(self, facts: Said) -> list[Said]:
        """Return the facts of each rank."""
        own = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
        counts = torch.cat(self.tell("agree", torch.tensor([len(own)]))).tolist()
        return [json.loads(bytes(text.numpy())) for text in self.tell("agree", own, counts)]


class Waiter:
    """A thread that waits inside the backend, whose waits cannot be prolonged or looked at."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[None], Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._serve, name="carry", daemon=True).start()

    def begin(self, work: Callable[[], object]) -> Future[None]:
        """Do `work` behind what was begun before."""
        future: Future[None] = Future()
        self._work.put((future, work))
        return future

    def close(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        while (given := self._work.get()) is not None:
            future, work = given
            try:
                work()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)
            del given, future, work


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
        with channel.doing("gather"):
            dist.all_gather_into_tensor(parts, own, group=channel.group)

    def exchange(
        self, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        with self._channel.doing("exchange"):
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

    def agree(self, facts: Said) -> list[Said]:
        return self._channel.agree(facts)

    def storing(self, call: str | None) -> None:
        self._channel.watcher.storing(call)


class TorchRanks(Ranks):
    """Ranks that joined each other (`join_ranks` in megatrain/ranks/launcher.py)."""

    def __init__(self, owner: Owner, device: str, deadline_s: float, watcher: Watcher) -> None:
        """Make the groups: all ranks do so at once. Torch's default group, on gloo, is one."""
        self.owner = owner
        self._watcher = watcher
        self.patience_s = deadline_s
        backend = dist.get_default_backend_for_device(torch.device(device).type)

        def channel(name: str, group: Any, waiter: Waiter | None = None) -> Channel:
            return Channel(
                name=name, group=group, owner=owner, deadline_s=deadline_s, watcher=watcher,
                waiter=waiter,
            )  # fmt: skip

        timeout = timedelta(seconds=deadline_s)
        comm = channel("comm", dist.new_group(timeout=timeout, backend=backend))
        self._share = channel("share", dist.group.WORLD)
        self._waiter = Waiter()
        carry = channel("carry", dist.new_group(timeout=timeout), self._waiter)
        self.carrier = GlooCarrier(carry)
        self.wire: Wire = GlooWire(comm) if backend == "gloo" else DeviceWire(comm)

    def share(self, numbers: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(list(numbers), dtype=torch.float64)
        told: list[Any] = [part.tolist() for part in self._share.tell("share", own)]
        return told

    def agree(self, facts: Said) -> list[Said]:
        return self._share.agree(facts)

    def fail(self, error: BaseException) -> None:
        self._watcher.fail(error)

    def close(self) -> None:
        self._watcher.close()
        self._waiter.close()
        dist.destroy_process_group()


def plain_text(error: BaseException) -> str:
    """Return the message of a backend's error, without its place in the source and its advice."""
    line = str(error).partition("\n")[0].partition(" This is typically caused")[0]
    return re.sub(r"^\[[^\]]*:\d+\] ", "", line)
