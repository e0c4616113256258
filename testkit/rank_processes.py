"""Ranks as processes of this machine, with gloo on the loopback.

    results = run_ranks(3, work, 1, 2)      # work(ranks, 1, 2) in each; results in rank order

`work` is a function of a module. It runs in a fork of `WarmPython` with one thread, its result is
pickled. The store is of this process, as with torchrun it is the agent's.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from megatrain.errors import RankLost
from megatrain.ranks.launcher import init_distributed
from megatrain.ranks.ranks import Ranks
from testkit.patience import HANG_S, eventually
from testkit.warm_python import warm_python

Given = ParamSpec("Given")
Result = TypeVar("Result")
ROOT = Path(__file__).parents[1]
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the process of one rank ended."""

    exit_code: int
    result: Any = None
    error: BaseException | None = None
    trace: str = ""


def run_ranks(
    size: int,
    work: Callable[Concatenate[Ranks, Given], Result],
    *args: Given.args,
    **settings: Given.kwargs,
) -> list[Result]:
    """Return the results of all ranks. Raises the error of one, its own before a RankLost."""
    outcomes = rank_outcomes(size, partial(work, **settings), *args)
    failed = [outcome for outcome in outcomes if outcome.exit_code]
    own = [outcome for outcome in failed if not isinstance(outcome.error, RankLost)]
    for outcome in (own or failed)[:1]:
        ended = AssertionError(f"a rank ended with code {outcome.exit_code}")
        raise (outcome.error or ended) from AssertionError(outcome.trace)
    return [outcome.result for outcome in outcomes]


def rank_outcomes(
    size: int, work: Callable[..., object], *args: object, deadline_s: float = DEADLINE_S
) -> list[Outcome]:
    """Return how each rank ended, once all have; none is left behind."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=HANG_S)
    )
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        Path(folder, "work").write_bytes(pickle.dumps((work, args)))
        where = [folder, str(size), str(store.port), str(deadline_s)]
        processes = [_start([str(rank), *where]) for rank in range(size)]
        try:
            ended = eventually(lambda: all(process.poll() is not None for process in processes))
            assert ended, "a rank hangs"
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [_outcome(Path(folder), *pair) for pair in enumerate(processes)]


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*warm_python().command, "-m", "testkit.rank_processes", *words], cwd=ROOT
    )


def _outcome(folder: Path, rank: int, process: subprocess.Popen[bytes]) -> Outcome:
    said = folder / f"said-{rank}"
    facts = pickle.loads(said.read_bytes()) if said.exists() else {}  # noqa: S301  (our own)
    return Outcome(exit_code=process.returncode, **facts)


def main() -> None:
    """Be one rank."""
    rank, folder, size, port, deadline_s = sys.argv[1:]
    os.environ |= {
        "RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    torch.set_num_threads(1)
    work, args = pickle.loads(Path(folder, "work").read_bytes())  # noqa: S301  (our own)
    said: dict[str, Any]
    try:
        ranks = init_distributed("cpu", float(deadline_s))
        said = {"result": work(ranks, *args)}
        ranks.close()
    except Exception as error:
        said = {"error": error, "trace": traceback.format_exc()}
    Path(folder, f"said-{rank}").write_bytes(pickle.dumps(said))
    os._exit(1 if "error" in said else 0)  # at once: others wait for this rank's sockets to close


if __name__ == "__main__":
    main()
