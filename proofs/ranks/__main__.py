"""Disturb runs of several ranks at random instants, resume them, compare their ends bit for bit.

    python -m proofs.ranks sigkill   --count 200 --json
    python -m proofs.ranks partition --count 100 --json
    python -m proofs.ranks delay     --count 100 --json

Real runs of `megatrain train` on 31k parameters with 2, 3 and 4 ranks: see proofs/ranks/trials.py.
Partitions and delays need root: each rank is on a host of its own, a network namespace.

    disturbed   attempts that something happened to; the count, or a few more
    named       attempts that ended with RankLost on all ranks, and the lost one was named
    went on     attempts that ended as if nothing had happened
    max_s       the longest from the disturbance to the end of the last process

Chain number i is always the same; what its disturbances meet depends on the machine. Ends with 1 if
a checkpoint was torn or lost, a process left behind, nobody named, or the end was another.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers

import megatrain.ranks.torch_ranks  # noqa: F401  (a run imports these late: forks have them)
from proofs.crash.forks import Child, Tell, gather
from proofs.ranks.hosts import Hosts, can_make_hosts
from proofs.ranks.trials import SIZES, World
from testkit.printed import print_figures
from testkit.runs import write_world

NUM_JOBS = 4
"""Chains at a time: after a disturbance ranks wait more than they work."""
COUNTS = {"sigkill": 200, "partition": 100, "delay": 100}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=sorted(COUNTS))
    parser.add_argument("--count", type=int, help="disturbances")
    parser.add_argument("--first", type=int, default=0, help="number of the first chain")
    parser.add_argument("--jobs", type=int, default=NUM_JOBS, help="chains at a time")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    count = COUNTS[options.what] if options.count is None else options.count
    why_not = None if options.what == "sigkill" else can_make_hosts()
    if why_not is not None:
        result: dict[str, Any] = {"skipped": why_not, "failures": []}
    else:
        with tempfile.TemporaryDirectory(prefix="megatrain-ranks-") as scratch:
            result = run(
                Path(scratch), options.what, count, options.first, options.jobs,
                tell=not options.json,
            )  # fmt: skip
    print_figures(result, as_json=options.json)
    sys.exit(bool(result["failures"]))


def run(
    scratch: Path, what: str, count: int, first: int, num_jobs: int, *, tell: bool
) -> dict[str, Any]:
    """Disturb `count` times or some more; return what was found."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    began = time.monotonic()
    _let(lambda _: write_world(scratch), scratch)
    for name in _let(functools.partial(_rehearse, scratch, what, SIZES[0]), scratch)[:-1]:
        with suppress(ImportError):  # what a run imports late is here before any fork
            importlib.import_module(name)
    assert threading.active_count() == 1, "only a lone thread may fork"
    life_s = {
        size: float(_let(functools.partial(_rehearse, scratch, what, size), scratch)[-1])
        for size in SIZES[: max(1, count)]
    }
    num_jobs = min(num_jobs, max(1, count // 2))
    share = -(-count // num_jobs)
    workers = [
        Child(
            functools.partial(_work, life_s, scratch, what, share, first + job, num_jobs),
            scratch / "log",
        )
        for job in range(num_jobs)
    ]
    counts: Counter[str] = Counter()
    failures: list[str] = []
    max_s = 0.0
    for line in gather(workers):
        found = json.loads(line)
        counts.update(found["counts"])
        failures += found["failures"]
        max_s = max(max_s, found["max_s"])
        if tell:
            print(f"{time.monotonic() - began:.0f} s: {dict(counts)} {failures}", flush=True)
    if any(worker.status != 0 for worker in workers):
        failures.append(f"a worker died: {(scratch / 'log').read_text()[-2000:]}")
    found = {key: counts[key] for key in ("disturbed", "chains", "torn", "lost", "named")}
    more = {key: counts[key] for key in sorted(counts.keys() - found.keys())}
    seconds = round(time.monotonic() - began, 1)
    return {"what": what, **found, **more, "max_s": max_s, "seconds": seconds, "failures": failures}


def _rehearse(scratch: Path, what: str, size: int, tell: Tell) -> None:
    """Run a size undisturbed; tell which modules it has imported, and how long it has lived."""
    with _hosts(what) as hosts:
        world = World(scratch, what, hosts, {})
        life_s = world.rehearse(size)
    for line in (*world.imported, life_s):
        tell(str(line))


@contextmanager
def _hosts(what: str) -> Iterator[Hosts | None]:
    if what == "sigkill":
        yield None
    else:
        with Hosts(max(SIZES)) as hosts:
            yield hosts


def _work(
    life_s: Mapping[int, float], scratch: Path, what: str, count: int, number: int, stride: int,
    tell: Tell,
) -> None:  # fmt: skip
    """Disturb so often, in every so many-th chain from `number` on; tell of each chain."""
    with _hosts(what) as hosts:
        done = 0
        while done < count:
            world = World(scratch, what, hosts, life_s)
            world.chain(number)
            done += world.counts["disturbed"]
            number += stride
            tell(json.dumps(world.result()))
            if world.failures:
                return


def _let(work: Any, scratch: Path) -> list[str]:
    """Let a child work to its end; return what it told."""
    child = Child(work, scratch / "log")
    child.end(time.monotonic() + 3600)
    assert child.status == 0, (scratch / "log").read_text()[-4000:]
    return child.lines


if __name__ == "__main__":
    main()
