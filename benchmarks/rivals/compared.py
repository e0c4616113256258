"""Step time and resident memory of each contestant. All definitions were fixed before a result.

The same for all: a model of random weights in the shape of Qwen3 (subjects.py), the same tokens,
every layer recomputed in backward, sdpa attention, AdamW with the same numbers, clipping by the
global norm, two threads. A step ends when all weights are updated.

    speed   141M parameters, fp32 throughout (processors without bf16 units compute bf16 ten times
            as slowly), 2 micro-batches of 1 x 256 tokens. Ours and one rival at a time are loaded;
            they take turns, one step each, who begins alternates, and the one that waits is
            stopped. `over` is the median over rounds of ours over the rival's seconds,
            `over_interval` holds the median of all possible rounds in 9 of 10 runs at least, and
            `processor_over` is of processor time, which a busy machine changes less. What both
            sides may have, both have: torch.compile, huge pages for torch's own allocations
            (THP_MEM_ALLOC_ENABLE), moments in 8 bits. The last rows are of our own settings that
            save memory, against our own defaults.
            step_over_best       the largest `over` of all rivals, in their best settings
            first_step_s         from the start of the process to the end of its first step
    bytes   407M parameters, one row of 16 tokens, two steps, each contestant alone. fp32 masters
            in all of them; everything in memory, nothing on disk.
            bytes_per_param      VmHWM over parameters, interpreter and libraries included
            bytes_over_best      our leanest over the leanest rival, whatever its states
            bytes_over_best_fp32_states    the same among those with fp32 moments
"""

from __future__ import annotations

import ast
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rivals.contestants import WORKERS, Contestant, Taken, WorkerFailed
from benchmarks.rivals.environments import python_of
from benchmarks.rivals.subjects import BYTES, SPEED, VOCABULARY, qwen3, write_model, write_tokens
from benchmarks.rivals.workers.serving import Job

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contestant as it is set up: its worker, and what is its own in the job."""

    worker: str
    label: str
    dtype: str = "float32"
    settings: dict[str, Any] = field(default_factory=dict)
    states: str = "fp32"
    """Of the optimizer's moments."""
    home: str | None = None
    """An environment other than the worker's usual one."""
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, job: Path) -> Contestant:
        """Start its worker on a job."""
        python = None if self.home is None else python_of(self.home)
        return Contestant(self.worker, job, python=python, environment=self.environment)

    @property
    def is_ours(self) -> bool:
        return self.worker == "ours"


OURS = Entry(worker="ours", label="MegaTrain")
HUGE = {"THP_MEM_ALLOC_ENABLE": "1"}
FUSED = {"optimizer": "fused"}
COMPILED = {"step": {"compile": True}}
SECOND_BACKWARD = {"step": {"update": "second_backward"}}
EIGHT_BITS = Entry(worker="ours", label="MegaTrain, 8bit states", settings={"state": "8bit"})
TRAINER = Entry(worker="trainer", label="HF Trainer", settings={"optim": "adamw_torch_fused"})
TORCHAO = Entry(
    worker="trainer",
    label="HF Trainer, torchao 8 bits",
    settings={"optim": "adamw_torch_8bit"},
    states="8bit",
    home="torchao",
)
RACES = (
    (OURS, Entry(worker="plain", label="plain PyTorch", settings=FUSED)),
    (
        OURS,
        Entry(
            worker="plain",
            label="plain PyTorch, chunked loss",
            settings=FUSED | {"head": "chunked"},
        ),
    ),
    (
        Entry(worker="ours", label="MegaTrain, huge pages", environment=HUGE),
        Entry(worker="plain", label="plain PyTorch, huge pages", settings=FUSED, environment=HUGE),
    ),
    (
        Entry(worker="ours", label="MegaTrain, compiled", settings=COMPILED),
        Entry(
            worker="plain",
            label="plain PyTorch, torch.compile",
            settings=FUSED | {"compile": True},
        ),
    ),
    (OURS, TRAINER),
    (EIGHT_BITS, TORCHAO),
    (OURS, Entry(worker="fsdp2", label="FSDP2, CPU offload")),
    (OURS, Entry(worker="deepspeed", label="DeepSpeed ZeRO-3, CPU offload")),
    (OURS, EIGHT_BITS),
    (OURS, Entry(worker="ours", label="MegaTrain, second backward", settings=SECOND_BACKWARD)),
)
"""Ours, and what it takes turns with."""
LEAN = (
    Entry(worker="plain", label="plain PyTorch", settings={"head": "chunked"}),
    TRAINER,
    TORCHAO,
    Entry(
        worker="trainer",
        label="HF Trainer, torchao 4 bits",
        settings={"optim": "adamw_torch_4bit"},
        states="4bit",
        home="torchao",
    ),
    Entry(worker="fsdp2", label="FSDP2, CPU offload"),
    Entry(worker="fsdp2", label="FSDP2, CPU offload, bf16", dtype="bfloat16"),
    Entry(worker="deepspeed", label="DeepSpeed ZeRO-3, CPU offload"),
    Entry(worker="deepspeed", label="DeepSpeed ZeRO-3, CPU offload, bf16", dtype="bfloat16"),
    Entry(
        worker="deepspeed",
        label="DeepSpeed ZeRO-3, bf16",
        dtype="bfloat16",
        settings={"offload": "none"},  # leaner, and all of it is in host memory anyway
    ),
    *(
        Entry(
            worker="ours",
            label=f"MegaTrain, {state} states",
            dtype="bfloat16",
            settings={"state": state},
            states=state,
        )
        for state in ("fp32", "bf16", "8bit")
    ),
    Entry(
        worker="ours",
        label="MegaTrain, 8bit states, second backward",
        dtype="bfloat16",
        settings={"state": "8bit"} | SECOND_BACKWARD,
        states="8bit",
    ),
)


def measure_speed(scratch: Path, device: str, num_rounds: int) -> Figures:
    """Return the figures of part `speed`."""
    written = _write(scratch / "speed", SPEED, steps=4, rows=2, sequence=256)
    shared = written | {"micro_batches": 2, "device": device}
    rows = [turns_of(*pair, shared, scratch, num_rounds) for pair in RACES]
    return {"speed": rows, **step_over_best(rows)}


def step_over_best(rows: Sequence[Figures]) -> Figures:
    """Return the ratio to the rival that comes nearest, as far as rivals ran."""
    ran = [row for row in rows if "over" in row and not row["is_ours"]]
    if not ran:
        return {}
    best = max(ran, key=lambda row: float(row["over"]))
    return {
        "step_over_best": best["over"],
        "step_over_best_interval": best["over_interval"],
        "step_over_best_rival": best["label"],
        "processor_over_best": max(row["processor_over"] for row in ran),
    }


def turns_of(ours: Entry, rival: Entry, shared: Figures, scratch: Path, num_rounds: int) -> Figures:
    """Return a row: seconds of both in turns, or why the rival did not run."""
    row: Figures = _described(rival) | {"is_ours": rival.is_ours}
    taken: dict[str, list[Taken]] = {"rival": [], "ours": []}
    with ExitStack() as stack:
        try:
            workers = {}
            for name, entry in (("rival", rival), ("ours", ours)):
                job = _job(entry, shared).write(scratch / f"{name}.json")
                worker = stack.enter_context(entry.start(job))
                ready, first = worker.ready(), worker.step()
                row[f"{name}_first_step_s"] = round(ready["seconds"] + first.seconds, 2)
                row[f"{name}_first_loss"] = first.loss
                workers[name] = worker
            names = list(workers)
            for _ in range(num_rounds):
                for name in names:
                    taken[name].append(workers[name].step())
                names.reverse()
        except WorkerFailed as error:
            return _told(row | {"failed": str(error)})
    for name, steps in taken.items():
        row[f"{name}_s"] = _median(step.seconds for step in steps)
        row[f"{name}_processor_s"] = _median(step.processor_s for step in steps)
        row[f"{name}_loss"] = steps[-1].loss
    both = list(zip(taken["ours"], taken["rival"], strict=True))
    ratios = [a.seconds / b.seconds for a, b in both]
    row["over"], row["over_interval"] = _median(ratios), median_interval(ratios)
    row["processor_over"] = _median(a.processor_s / b.processor_s for a, b in both)
    return _told(row)


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def median_interval(values: Sequence[float], confidence: float = 0.9) -> list[float]:
    """Return the narrowest pair of values that holds the median with this confidence.

    The number of values below the median is that of heads among coins, whatever their spread. Few
    values may not reach the confidence; then it is the lowest and the highest.
    """
    ordered, count = sorted(values), len(values)
    outside, outer = 0.0, 0
    for place in range((count + 1) // 2):
        outside += 2 * math.comb(count, place) / 2**count
        if outside > 1 - confidence:
            break
        outer = place
    return [round(ordered[outer], 3), round(ordered[count - 1 - outer], 3)]


def _told(row: Figures) -> Figures:
    """Return a row, which is on stderr as soon as it is known."""
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def measure_bytes(scratch: Path, device: str) -> Figures:
    """Return the figures of part `bytes`."""
    shared = _write(scratch / "bytes", BYTES, steps=2, rows=1, sequence=16)
    rows = [held_by(entry, shared | {"device": device}, scratch) for entry in LEAN]
    return {"bytes": rows, **bytes_over_best(rows)}


def held_by(entry: Entry, shared: Figures, scratch: Path) -> Figures:
    """Return a row: the most that a contestant held in two steps, alone."""
    row = _described(entry) | {"states": entry.states, "is_ours": entry.is_ours}
    job = _job(entry, shared).write(scratch / "alone.json")
    try:
        with entry.start(job) as worker:
            params = worker.ready()["params"]
            steps = [worker.step() for _ in range(2)]
    except WorkerFailed as error:
        return _told(row | {"failed": str(error)})
    peak = steps[-1].peak_bytes
    row |= {"params": params, "peak_bytes": peak, "bytes_per_param": round(peak / params, 2)}
    if steps[-1].device_bytes is not None:
        row["device_bytes"] = steps[-1].device_bytes
    return _told(row)


def bytes_over_best(rows: Sequence[Figures]) -> Figures:
    """Return the ratios of a part `bytes`, as far as contestants ran."""

    def least(*, ours: bool, states: str | None) -> Figures | None:
        ran = [row for row in rows if row["is_ours"] == ours and "bytes_per_param" in row]
        among = [row for row in ran if states in (None, row["states"])]
        return min(among, key=lambda row: float(row["bytes_per_param"]), default=None)

    figures: Figures = {}
    for name, states in (("bytes_over_best", None), ("bytes_over_best_fp32_states", "fp32")):
        ours, best = least(ours=True, states=states), least(ours=False, states=states)
        if ours is not None and best is not None:
            figures[name] = round(ours["bytes_per_param"] / best["bytes_per_param"], 3)
            figures[f"{name}_rival"] = best["label"]
    return figures


def code_lines(worker: str) -> int:
    """Return the lines that one writes for the job: the worker's, without imports and prose."""
    tree = ast.parse((WORKERS / f"{worker}.py").read_text())
    body = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in ast.walk(ast.Module(body=list(body), type_ignores=[])):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return sum(len(ast.unparse(node).splitlines()) for node in body)


def _described(entry: Entry) -> Figures:
    return {
        "label": entry.label,
        "worker": f"benchmarks/rivals/workers/{entry.worker}.py",
        "dtype": entry.dtype,
        "settings": entry.settings,
    }


def _job(entry: Entry, shared: Figures) -> Job:
    return Job(**shared, dtype=entry.dtype, settings=entry.settings)


def _write(folder: Path, size: Figures, **tokens: int) -> Figures:
    """Write model and tokens; return the fields of a job that name them."""
    if (folder / "model").exists():
        return {"model": str(folder / "model"), "tokens": str(folder / "tokens.npy")}
    folder.mkdir()
    written = write_tokens(folder / "tokens.npy", vocabulary=VOCABULARY, **tokens)
    model = write_model(folder / "model", qwen3(**size))
    return {"model": str(model), "tokens": str(written)}
