"""The file calls of all ranks of a few saves, in one log.

Ranks are threads (testkit/rank_threads.py) that share the smallest run there is: each has its part
of every tensor, and the blocks are written by one rank each. The calls go through one recorder, so
their order is that in which they were made, and respects what ranks tell each other. A save is
acknowledged as soon as the first rank hears of it.

    spoil     what the ranks other than the first leave out, to see that the proof notices
    files     the fsync of their files
    folders   the fsync of the folders that they have made names in
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from megatrain.disk.checkpoint import save
from megatrain.memory.file_calls import FileCalls
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import Ranks
from proofs.crash.recorded import Log, Op, Recorder, recorded
from proofs.crash.tiny import TinyRun
from testkit.rank_threads import Together

Result = TypeVar("Result")
SPOILS = ("files", "folders")
NUM_SAVES = 2
_HERE = threading.local()


class _RankCalls(FileCalls):
    """File calls whose threads know the rank that has made them."""

    def __init__(self) -> None:
        self._rank = rank_here()
        super().__init__()

    def _act(
        self,
        future: Future[Result],
        work: Callable[[], Result],
        undo: Callable[[Result], object],
    ) -> None:
        _HERE.rank = self._rank
        super()._act(future, work, undo)


class _Lazy(Recorder):
    """Leaves some fsyncs of the ranks other than the first out."""

    def __init__(self, root: Path, log: Log, spoil: str) -> None:
        super().__init__(root, log, rank_here=rank_here)
        self._spoil = spoil

    def _on_fsync(self, real: Any, fd: int) -> None:
        is_folder = isinstance(self._fds[fd], str)
        if rank_here() == 0 or is_folder != (self._spoil == "folders"):
            super()._on_fsync(real, fd)


def rank_here() -> int:
    """Return the rank of this thread."""
    return getattr(_HERE, "rank", 0)


def record_ranks(folder: Path, size: int, spoil: str | None = None) -> list[Op]:
    """Return what `size` ranks do to the disk in a few saves, each followed by a delete."""
    log, root = Log(), folder.parent
    right = Recorder(root, log, rank_here=rank_here)
    recorder = right if spoil is None else _Lazy(root, log, spoil)
    with patch.object(save, "FileCalls", _RankCalls), recorded(recorder):
        runs = [TinyRun(folder, owner=Owner(rank, size)) for rank in range(size)]

        def work(ranks: Ranks) -> None:
            _HERE.rank = ranks.owner.rank
            run = runs[ranks.owner.rank]
            for _ in range(NUM_SAVES):
                run.take_step()
                run.save(ranks=ranks)
                recorder.ack(run.step)
                if ranks.owner.leads:
                    run.prune(keep=1)

        try:
            Together(size).run(work)
        finally:
            runs[0].folder.close()
    shutil.rmtree(folder)
    return log.ops
