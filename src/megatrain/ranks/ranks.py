"""Ranks: what the processes of a run do together. `ALONE` is the same for one process.

    wire       moves blocks between the devices of ranks: used by lane comm alone
    share      a few numbers of each rank, to all
    agree      a small fact of each rank, to all
    carrier    bytes of host memory from rank to rank: used by a save or an export alone

All ranks call the same things in the same order. Wire, carrier, and share with agree each have
their own communicator, so that lanes, the caller of a step and a save never wait for each other.
Everything else that a run asks of its ranks is made of `agree`:

    on_first, decide                  rank 0 acts, or chooses for all
    any                               whether something is so on some rank
    require_same, require_shared      facts and folders that all ranks must have in common
    notes                             remarks of other ranks
    long_work, once_per_host, ...     work that takes longer than the deadline

A caller need not know whether there are other ranks: one process is the first of one, agrees with
itself, and has nothing to compare.

Laws (tests/ranks/test_torch_ranks.py, tests/ranks/test_ranks.py)
    1. A rank gets the words of each rank, in the order of ranks, or an error.
    2. No wait for a rank that is lost is longer than the deadline. The error names the rank. A
       carrier waits as long as another rank waits for its storage.
    3. A fact that differs on any rank is a ConfigError on all, which names fact, values and ranks.
    4. A folder that is not the same for all is found out before anything is written for the run,
       and nothing stays in the folder.
    5. All ranks return from long work once all are done, however much longer than the deadline
       some work. Whatever one rank makes for others is there before any of them looks for it.
    6. A rank whose work fails raises its own error at once; the others get RankLost.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from megatrain.errors import ConfigError, RunFolderError, listing
from megatrain.files import remove, write_file
from megatrain.ranks.ownership import SOLE, Owner

if TYPE_CHECKING:  # a process alone is known before torch is imported
    from torch import Tensor

Made = TypeVar("Made")
RankInfo = Mapping[str, Any]
"""Facts of a rank, of values that JSON has."""
PULSE_S = 1.0
"""Time between two signs of life of a rank that works."""
_MOST_TEXT = 200


class Wire(Protocol):
    """Moves blocks. Inside an op, calls are queued on the stream of the lane."""

    def gather(self, parts: Tensor) -> None:
        """Fill the parts of others in `parts`, flat bytes: equal parts, of which one is ours."""

    def exchange(
        self, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        """Send each rank its elements of `sent`, flat, and get ours of each into `received`.

        Both are in the order of ranks; the numbers say how many elements are for and from each.
        """


class Carrier(Protocol):
    """Moves bytes of host memory from one rank to another."""

    def send(self, data: Tensor, rank: int) -> None:
        """Return when `data`, flat bytes, may change."""

    def receive(self, data: Tensor, rank: int) -> None:
        """Fill `data`, flat bytes, with those that the rank sends."""

    def agree(self, facts: RankInfo) -> list[RankInfo]:
        """Do what `Ranks.agree` does, between sends and receives."""


class Ranks(ABC):
    """All ranks of a run, as one of them sees them."""

    owner: Owner
    patience_s: float
    """Time that a call waits for other ranks before it looks for the one that is lost."""
    wire: Wire
    carrier: Carrier

    @abstractmethod
    def share(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers that each rank gives; all give as many."""

    @abstractmethod
    def agree(self, facts: RankInfo) -> list[RankInfo]:
        """Return the facts of each rank, once all have given theirs."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """See to it that this process ends soon, whatever its threads wait for."""

    @abstractmethod
    def close(self) -> None:
        """Leave. The others must leave too."""

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes the run folder and prints."""
        return self.owner.leads

    def on_first(self, work: Callable[[], Made]) -> Made | None:
        """Return what `work` returns on rank 0; the others do nothing, and do not wait."""
        return work() if self.leads else None

    def decide(self, choose: Callable[[], Any]) -> Any:
        """Return on all ranks what `choose`, called on rank 0 alone, returns there.

        That must be a value that JSON has.
        """
        return self.agree({"decided": self.on_first(choose)})[0]["decided"]

    def any(self, here: bool) -> bool:
        """Return whether it is so on any rank."""
        return any(said["here"] for said in self.agree({"here": here}))

    def notes(self, own: Sequence[str]) -> list[str]:
        """Return, on rank 0, the notes of other ranks that are not among its `own`.

        Each is labeled with its rank; equal ones of several ranks are one.
        """
        heard = self.agree({"notes": list(own)})
        said: dict[str, list[int]] = {}
        for rank, one in enumerate(heard if self.leads else []):
            for note in one["notes"]:
                if note not in own:
                    said.setdefault(note, []).append(rank)
        return [f"rank {', '.join(map(str, of))}: {note}" for note, of in said.items()]

    def require_same(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Raise ConfigError unless `facts`, which JSON can say, are the same on all ranks."""
        heard = self.agree({"facts": facts()})
        found = [{name: json.dumps(v) for name, v in said["facts"].items()} for said in heard]
        names = dict.fromkeys(name for of_rank in found for name in of_rank)
        differing = [_difference(name, found) for name in names if len(_values(name, found)) > 1]
        if differing:
            raise ConfigError(
                "ranks of one run must have the same settings, model, data, code and packages, but "
                "these differ:\n  "
                + "\n  ".join(differing)
                + "\nStart all of them with the same command, files and installed packages."
            )

    def hosts(self) -> list[str]:
        """Return the name of each rank's host."""
        return [str(said["host"]) for said in self.agree({"host": socket.gethostname()})]

    def neighbors(self) -> list[int]:
        """Return the ranks of this host, this one included."""
        hosts = self.hosts()
        return [rank for rank, host in enumerate(hosts) if host == hosts[self.owner.rank]]

    def require_shared(self, folder: Path) -> None:
        """Raise RunFolderError unless all ranks see rank 0's run folder, which exists there."""
        sees, hosts = self._seen(folder), self.hosts()
        blind = [f"rank {rank} on {hosts[rank]}" for rank, does in enumerate(sees) if not does]
        if blind:
            raise RunFolderError(
                f"save.dir: {listing(blind)} cannot see {folder}, which rank 0 on {hosts[0]} has "
                "opened. Ranks write a checkpoint together: set save.dir to a folder on a file "
                "system that all hosts share, by the same path; MEGATRAIN_CACHE, if save.dir is a "
                "URL."
            )

    def _seen(self, folder: Path) -> list[bool]:
        """Return, for each rank, whether it sees a file that rank 0 writes into `folder`."""
        name = f".seen-{secrets.token_hex(8)}"
        self.on_first(lambda: write_file(folder / name, b"", durable=False))
        try:
            looked_for = folder / str(self.decide(lambda: name))
            return [bool(said["sees"]) for said in self.agree({"sees": looked_for.exists()})]
        finally:
            self.on_first(lambda: remove(folder / name))

    def long_work(self, work: Callable[[], Made]) -> Made:
        """Do `work`, which may not talk to other ranks, and return when all have done theirs.

        A collective waits until the deadline at most, but rows take hours to tokenize and weights
        minutes to read. While a rank works, a thread of its own tells the others that it is alive.
        """
        done, failed = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def tell() -> None:
            try:
                while True:
                    heard = self.agree({"done": done.is_set(), "failed": failed.is_set()})
                    if any(said["failed"] for said in heard) or all(said["done"] for said in heard):
                        return
                    done.wait(PULSE_S)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=tell, name="signs of life", daemon=True)
        thread.start()
        try:
            result = work()
        except BaseException:
            failed.set()
            done.set()
            raise
        done.set()
        thread.join()
        if errors:
            raise errors[0]
        return result

    def on_each_host(self, work: Callable[[], object]) -> None:
        """Do long work on the first rank of each host, while the others wait."""
        self._at_makers(work, makes=self.neighbors()[0] == self.owner.rank)

    def once_per_host(self, work: Callable[[], Made]) -> Made:
        """Do long work on the first rank of each host; then the others find there what it made."""
        return self._makers_first(work, makes=self.neighbors()[0] == self.owner.rank)

    def once_per_folder(self, folder: Path, work: Callable[[], Made]) -> Made:
        """Do long work, which keeps its result in `folder`, once for each such folder."""
        return self._makers_first(work, makes=self.sharing(folder)[0] == self.owner.rank)

    def sharing(self, folder: Path) -> list[int]:
        """Return the ranks that have this rank's `folder` too, this one included.

        Hosts may see the same one, which exists on rank 0, or each its own under the same name.
        """
        sees, near = self._seen(folder), self.neighbors()
        own = sees[self.owner.rank]
        return [rank for rank, does in enumerate(sees) if does == own and (own or rank in near)]

    def _makers_first(self, work: Callable[[], Made], *, makes: bool) -> Made:
        made = self._at_makers(work, makes=makes)
        found = self._at_makers(work, makes=not makes)
        return made if makes else found  # type: ignore[return-value]  # what `work` gave

    def _at_makers(self, work: Callable[[], Made], *, makes: bool) -> Made | None:
        return self.long_work(work if makes else lambda: None)


def _values(name: str, found: list[dict[str, str]]) -> dict[str, list[int]]:
    """Return the ranks that have each value."""
    values: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(found):
        values.setdefault(of_rank.get(name, "nothing"), []).append(rank)
    return values


def _difference(name: str, found: list[dict[str, str]]) -> str:
    values = _values(name, found)
    parts = [f"{value[:_MOST_TEXT]} on {_in_words(ranks)}" for value, ranks in values.items()]
    return f"{name}: {'; '.join(parts)}"


def _in_words(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listing(map(str, ranks))}"


class _NoWire:
    """The wire of a process alone, which moves nothing."""

    def gather(self, parts: Tensor) -> None:
        raise AssertionError("a process alone gathers nothing")

    def exchange(
        self, received: Tensor, sent: Tensor, num_received: Sequence[int], num_sent: Sequence[int]
    ) -> None:
        raise AssertionError("a process alone exchanges nothing")


class _NoCarrier:
    """The carrier of a process alone, which agrees with itself."""

    def send(self, data: Tensor, rank: int) -> None:
        raise AssertionError("a process alone carries nothing")

    def receive(self, data: Tensor, rank: int) -> None:
        raise AssertionError("a process alone carries nothing")

    def agree(self, facts: RankInfo) -> list[RankInfo]:
        return [facts]


class Alone(Ranks):
    """A process that has everything itself: nobody to compare with, and nobody to wait for."""

    owner, patience_s = SOLE, 0.0
    wire: Wire = _NoWire()
    carrier: Carrier = _NoCarrier()

    def share(self, numbers: Sequence[float]) -> list[list[float]]:
        return [list(numbers)]

    def agree(self, facts: RankInfo) -> list[RankInfo]:
        return [facts]

    def fail(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass

    def require_same(self, facts: Callable[[], Mapping[str, Any]]) -> None:
        pass

    def hosts(self) -> list[str]:
        return ["localhost"]

    def require_shared(self, folder: Path) -> None:
        pass

    def long_work(self, work: Callable[[], Made]) -> Made:
        return work()

    def sharing(self, folder: Path) -> list[int]:
        return [0]


ALONE = Alone()
