"""Plant frauds in the rounds of peers: an audit finds all of them, and none in honest rounds.

    python -m proofs.peers.audited --json
    python -m proofs.peers.audited --count 4 --spoil    # frauds are announced and not planted

A peer trains a tiny model by the trainer, in rounds of three steps. In each run it commits one
fraud at a step drawn at random: it skips a step, takes other rows or another rate, or begins a
round from stale weights. An audit repeats the rounds up to that one. The rounds before it are
honest and must be found true, and as many more are taken by peers that commit none, until there
are as many honest rounds as frauds. Ends with 1 if a fraud was not found or an honest round was
called false.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from megatrain.run.audit import Verdict, audit
from megatrain.run.trainer import Trainer
from testkit.frauds import FRAUDS, INNER_STEPS, Fraud, peer_config
from testkit.printed import print_figures
from testkit.runs import NUM_STEPS, write_world


def verdicts(world: Path, folder: Path, fraud: Fraud | None, at: int) -> list[Verdict]:
    """Return what an audit says of the rounds of a run, up to that of step `at`."""
    with (
        Trainer(peer_config(world, folder)) as trainer,
        fraud(trainer, at) if fraud else nullcontext(),
    ):
        trainer.train()
    last = -(-at // INNER_STEPS)
    return audit(folder / "run", range(1, last + 1), folder / "scratch", lambda text: None)


def run(scratch: Path, count: int, *, seed: int, spoil: bool, tell: bool) -> dict[str, Any]:
    """Plant `count` frauds; return what was found."""
    torch.set_num_threads(1)
    os.environ["MEGATRAIN_CACHE"] = str(scratch / "cache")
    write_world(scratch)
    draw, counts, began = random.Random(seed), Counter[str](), time.monotonic()
    failures: list[str] = []
    names = list(FRAUDS)
    while counts["frauds"] < count or counts["honest"] < count:
        number = counts["runs"]
        name = names[number % len(names)] if counts["frauds"] < count else None
        at = draw.randrange(INNER_STEPS + 1, NUM_STEPS + 1) if name else NUM_STEPS
        fraud = FRAUDS[name] if name and not spoil else None
        found = verdicts(scratch, scratch / str(number), fraud, at)
        counts["runs"] += 1
        honest = found[:-1] if name else found
        counts["honest"] += len(honest)
        wrong = [f"run {number}: {one}" for one in honest if one.reason is not None]
        counts["accused"] += len(wrong)
        if name:
            counts["frauds"] += 1
            counts[f"in {name}"] += 1
            if found[-1].reason is None or found[-1].number != -(-at // INNER_STEPS):
                counts["missed"] += 1
                wrong.append(f"run {number}: {name} at step {at}: {found[-1]}")
        failures += wrong
        if tell:
            print(f"{time.monotonic() - began:.0f} s: {dict(counts)}", flush=True)
    keys = ("frauds", "missed", "honest", "accused", "runs", *(f"in {name}" for name in names))
    return {
        "what": "audit",
        **{key: counts[key] for key in keys},
        "seconds": round(time.monotonic() - began, 1),
        "failures": failures[:10],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100, help="frauds, and honest rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spoil", action="store_true", help="commit no fraud; must end with 1")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megatrain-audited-") as scratch:
        result = run(
            Path(scratch),
            options.count,
            seed=options.seed,
            spoil=options.spoil,
            tell=not options.json,
        )
    print_figures(result, as_json=options.json)
    sys.exit(bool(result["failures"]))


if __name__ == "__main__":
    main()
