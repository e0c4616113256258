"""Long work among ranks: no rank loses patience with one that is still busy.

A collective waits until the deadline at most, but rows take hours to tokenize and weights minutes
to read. While a rank works, a thread of its own tells the others that it is alive.

Laws (tests/run/together/test_phases.py)
    1. All ranks return once all are done, however much longer than the deadline some work.
    2. What makers make is there before any other rank looks for it.
    3. A rank whose work fails raises its own error at once; the others get RankLost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatrain.ranks.ranks import Ranks
from megatrain.run.together.sight import neighbours, seen

Made = TypeVar("Made")
PULSE_S = 1.0
"""Between two signs of life."""


def unhurried(ranks: Ranks, work: Callable[[], Made]) -> Made:
    """Do `work`, which may not talk to other ranks, and return when all have done theirs."""
    if ranks.owner.is_alone:
        return work()
    done, failed = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def tell() -> None:
        try:
            while True:
                heard = ranks.agree({"done": done.is_set(), "failed": failed.is_set()})
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


def per_host(ranks: Ranks, work: Callable[[], Made]) -> Made:
    """Do `work` on the first rank of each host; then the others find there what it made."""
    return _makers_first(ranks, neighbours(ranks)[0] == ranks.owner.rank, work)


def per_folder(ranks: Ranks, folder: Path, work: Callable[[], Made]) -> Made:
    """Do `work`, which keeps its result in `folder`, once for each such folder.

    Hosts may see the same one, or each its own under the same name.
    """
    if ranks.owner.is_alone:
        return work()
    rank = ranks.owner.rank
    is_seen, nearest = seen(ranks, folder)[rank], neighbours(ranks)[0]
    return _makers_first(ranks, ranks.owner.leads or (not is_seen and nearest == rank), work)


def _makers_first(ranks: Ranks, makes: bool, work: Callable[[], Made]) -> Made:
    made = unhurried(ranks, work if makes else lambda: None)
    found = unhurried(ranks, (lambda: None) if makes else work)
    return made if makes else found  # type: ignore[return-value]  # what `work` gave
