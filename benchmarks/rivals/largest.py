"""The largest model that each contestant trains under a memory limit that the kernel enforces.

    python -m benchmarks.rivals.largest [--json] [--limits 2,4,8] [--only LABEL ...] [--models DIR]

A trial is a worker in a control group (benchmarks/control_group.py) on a rung of a ladder of models
(ladder.py): two steps on one row of 32 tokens, in a group without swap. The rung holds if both
losses are finite and the worker ends well within `PATIENCE_S`. Everything was fixed before the
first result:

    the same for all    AdamW with fp32 masters, clipping by the global norm, every layer recomputed
    rivals              each in the leanest of its settings with these (CLIMBERS), loaded in the
                        leanest way that it documents
    ours                with moments in 8 bits and a second backward, and as further rows without
                        it and with moments in bf16 and fp32
    disk                a row that keeps anything on disk is compared with rows that do too, and
                        under the lowest limit alone: the models would be too large for an hour

Short rows make activations small, so that the params decide. For all of them malloc returns freed
memory at once. Before the trials each contestant takes two steps on rung 0 without a limit: it
builds what it builds once, and libraries get into the page cache, where they count for no group.

    params                    of the largest model, by limit; null: not even rung 0
    bytes_per_param           the limit over that
    peak_bytes                most that the group of the largest model held
    largest_over_best         ours over the best rival, in memory alone, by limit
    largest_over_fp32_states  the same among those with fp32 moments
    largest_over_disk         the same among those that may use a disk
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.control_group import limited_group, memory_groups
from benchmarks.rivals.climbing import highest_rung
from benchmarks.rivals.compared import SECOND_BACKWARD, TRAINER, Entry
from benchmarks.rivals.contestants import command, variables
from benchmarks.rivals.environments import python_of
from benchmarks.rivals.ladder import Ladder
from benchmarks.rivals.subjects import write_tokens
from benchmarks.rivals.workers.serving import Job
from testkit.memory_group import MemoryGroup

GIB = 1 << 30
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
LIMITS = (2, 4, 8)
"""GiB."""
NUM_STEPS, NUM_TOKENS = 2, 32
PATIENCE_S = 900.0
"""A group at its limit may spend its time reading libraries again and again."""
DISK = "DISK"
"""In settings: a folder for scratch files."""
TABLE = Ladder().vocabulary * Ladder().hidden
"""Elements of the largest param of every rung."""
BASE_BYTES = 400 << 20
"""Of an interpreter with its libraries: the first guess, which the lowest limit corrects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Climber:
    """A contestant, and about what it needs."""

    entry: Entry
    per_param: float
    """Bytes, for a guess of where to begin."""
    disk: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of two steps on a rung."""

    holds: bool
    seconds: float
    peak_bytes: int | None
    reason: str


def _ours(state: str, per_param: float, more: str = "", **step: Any) -> Climber:
    entry = Entry(
        worker="ours",
        label=f"MegaTrain, {state} states{more}",
        dtype="bfloat16",
        settings={"state": state, **step},
        states=state,
    )
    return Climber(entry=entry, per_param=per_param)


def _trainer(optim: str, bits: str, per_param: float) -> Climber:
    entry = Entry(
        worker="trainer",
        label=f"HF Trainer, torchao {bits}",
        settings={"optim": optim},
        states=bits,
        home="torchao",
    )
    return Climber(entry=entry, per_param=per_param)


CLIMBERS = (
    Climber(
        entry=Entry(worker="plain", label="plain PyTorch", settings={"head": "chunked"}),
        per_param=16,
    ),
    Climber(entry=TRAINER, per_param=16),
    _trainer("adamw_torch_8bit", "8bit", 10),
    _trainer("adamw_torch_4bit", "4bit", 10),
    Climber(
        entry=Entry(worker="fsdp2", label="FSDP2, CPU offload", dtype="bfloat16"), per_param=16
    ),
    Climber(
        entry=Entry(
            worker="deepspeed",
            label="DeepSpeed ZeRO-3",
            dtype="bfloat16",
            settings={"offload": "none"},
        ),
        per_param=16,
    ),
    _ours("8bit", 6.03, ", second backward", **SECOND_BACKWARD),
    _ours("8bit", 8.03),
    _ours("bf16", 10),
    _ours("fp32", 14),
    Climber(
        entry=Entry(
            worker="deepspeed",
            label="DeepSpeed ZeRO-3, files",
            dtype="bfloat16",
            settings={
                "offload": DISK,
                "params": {"buffer_size": TABLE, "buffer_count": 2, "max_in_cpu": 0},
            },
        ),
        per_param=5,
        disk=True,
    ),
    Climber(
        entry=Entry(
            worker="ours",
            label="MegaTrain, states on disk",
            dtype="bfloat16",
            settings={"disk": DISK, "step": {"tier": "states"}},
        ),
        per_param=5.1,
        disk=True,
    ),
)


def measure_largest(
    climbers: Sequence[Climber], limits: Sequence[float], folder: Path, ladder: Ladder
) -> dict[str, Any]:
    """Return the figures; `folder` keeps the models."""
    parent = memory_groups()
    if parent is None:
        return {"skipped": "no control group for memory can be made here"}
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for each in climbers for row in climb(each, limits, parent, folder, ladder)]
    return {"largest": rows, **ratios(rows)}


def climb(
    climber: Climber, limits: Sequence[float], parent: Path, folder: Path, ladder: Ladder
) -> Iterator[dict[str, Any]]:
    """Yield a row for each limit, beginning with the lowest."""
    entry = climber.entry
    described = {
        "label": entry.label,
        "worker": f"benchmarks/rivals/workers/{entry.worker}.py",
        "dtype": entry.dtype,
        "settings": entry.settings,
        "states": entry.states,
        "is_ours": entry.is_ours,
        "disk": climber.disk,
    }
    first = attempt(entry, ladder, 0, folder)
    _tell(entry, None, ladder.params(0), first)
    if not first.holds:
        yield described | {"failed": first.reason}
        return
    base: float = BASE_BYTES
    for limit in sorted(limits)[: 1 if climber.disk else None]:
        trials: dict[int, Trial] = {}

        def holds(rung: int, limit: float = limit, trials: dict[int, Trial] = trials) -> bool:
            with limited_group(parent, int(limit * GIB)) as group:
                trials[rung] = attempt(entry, ladder, rung, folder, group)
            _tell(entry, limit, ladder.params(rung), trials[rung])
            return trials[rung].holds

        guess = ladder.rung_below((limit * GIB - base) / climber.per_param)
        rung = highest_rung(holds, guess)
        row = described | {"limit_gib": limit, "params": None, "trials": len(trials)}
        if rung is not None:
            params = ladder.params(rung)
            base = limit * GIB - climber.per_param * params
            row |= {"params": params, "layers": ladder.layers(rung)}
            row |= {"bytes_per_param": round(limit * GIB / params, 2)}
            row |= {"peak_bytes": trials[rung].peak_bytes, "seconds": trials[rung].seconds}
            row |= {"next_failed": trials[rung + 1].reason}
        yield row


def attempt(
    entry: Entry, ladder: Ladder, rung: int, folder: Path, group: MemoryGroup | None = None
) -> Trial:
    """Take two steps on a rung, in a group if there is one."""
    model = ladder.write(folder, rung)
    tokens = write_tokens(
        folder / "tokens.npy",
        steps=NUM_STEPS,
        rows=1,
        sequence=NUM_TOKENS,
        vocabulary=ladder.vocabulary,
    )
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    settings = {k: str(scratch) if v == DISK else v for k, v in entry.settings.items()}
    job = Job(model=str(model), tokens=str(tokens), dtype=entry.dtype, settings=settings)
    python = None if entry.home is None else python_of(entry.home)
    line = command(entry.worker, job.write(folder / "job.json"), python)
    begin = time.monotonic()
    try:
        run = subprocess.run(
            [*([] if group is None else group.enter), *line],
            input="step\n" * NUM_STEPS,
            capture_output=True,
            text=True,
            env=os.environ | variables(entry.worker) | GIVES_BACK,
            timeout=PATIENCE_S,
            check=False,
        )
        reason = judge(run.returncode, run.stdout, run.stderr)
    except subprocess.TimeoutExpired:
        reason = f"not done in {PATIENCE_S:.0f} s"
    shutil.rmtree(scratch)
    return Trial(
        holds=reason == "",
        seconds=round(time.monotonic() - begin, 1),
        peak_bytes=None if group is None else group.peak_bytes(),
        reason=reason,
    )


def judge(returncode: int, answers: str, errors: str) -> str:
    """Return why a worker has not done its two steps, or nothing if it has."""
    lines = [json.loads(line) for line in answers.splitlines() if line.startswith("{")]
    losses = [line["loss"] for line in lines if "loss" in line]
    if returncode == -9:
        return f"killed {_when(lines)}"
    if returncode != 0:
        return f"ended with {returncode} {_when(lines)}: {errors.strip()[-300:]}"
    if len(losses) != NUM_STEPS or not all(map(math.isfinite, losses)):
        return f"losses {losses}"
    return ""


def _when(lines: Sequence[Mapping[str, Any]]) -> str:
    return "while loading" if not lines else f"in step {len(lines)}"


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return ours over the best rival by limit, for each kind of comparison that has both."""
    kinds: dict[str, dict[str, object]] = {
        "largest_over_best": {"disk": False},
        "largest_over_fp32_states": {"disk": False, "states": "fp32"},
        "largest_over_disk": {"disk": True},
    }
    found: dict[str, Any] = {}
    for name, wanted in kinds.items():
        for limit in sorted({row["limit_gib"] for row in rows if row.get("params")}):
            ours, best = (
                max(
                    (
                        row["params"]
                        for row in rows
                        if row.get("params")
                        and row["limit_gib"] == limit
                        and row["is_ours"] == is_ours
                        and all(row[key] == value for key, value in wanted.items())
                    ),
                    default=None,
                )
                for is_ours in (True, False)
            )
            if ours is not None and best is not None:
                found.setdefault(name, {})[f"{limit:g}"] = round(ours / best, 3)
    return found


def _tell(entry: Entry, limit: float | None, params: int, trial: Trial) -> None:
    where = "no limit" if limit is None else f"{limit:g} GiB"
    outcome = "finished" if trial.holds else trial.reason.splitlines()[0]
    text = f"{entry.label:34} {where:>8} {params / 1e6:7.0f}M {trial.seconds:6.0f} s  {outcome}"
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limits", default=",".join(map(str, LIMITS)), help="GiB")
    parser.add_argument("--only", nargs="*", help="labels of contestants")
    parser.add_argument("--models", type=Path, default=None, help="keep the models here")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    options = parser.parse_args()
    chosen = [each for each in CLIMBERS if options.only is None or each.entry.label in options.only]
    limits = [float(limit) for limit in options.limits.split(",")]
    kept = options.models
    with tempfile.TemporaryDirectory() if kept is None else nullcontext(kept) as folder:
        figures = measure_largest(chosen, limits, Path(folder), Ladder())
    print(json.dumps(figures, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
