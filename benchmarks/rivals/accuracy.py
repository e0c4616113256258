"""The same fine-tuning by everyone: losses step by step, and on held-out text at the end.

    python -m benchmarks.rivals.accuracy [--json] [--steps 300] [--picture FILE]

A Qwen3 of 2.1M parameters has learned sources of Python's standard library, and is then fine-tuned
on the language reference (benchmarks/rivals/real_text.py): from one start in bf16, the same rows in
the same order, AdamW at a peak rate of 2e-5 with warm-up and a cosine to zero, and clipping by the
global norm. Each does it in its own process, with one thread.

    plain_fp32      the Hugging Face model in fp32, torch.optim.AdamW: what all are compared with
    plain_bf16      the same with all weights and moments in bf16: there are no masters
    deepspeed       ZeRO-3 with parameters and optimizer on the host, its bf16 engine
    ours_fp32       the engine, weights in fp32
    ours_bf16       weights in bf16 with fp32 masters, moments in fp32
    ours_8bit       weights in bf16 with fp32 masters, moments in 8 bits
    ours_fp8        the same as ours_bf16 with train.products fp8
    other_order     plain_fp32 with the rows in another order: the noise of any such change

The loss of a step is the one before its update. Held-out rows come as steps after the last one, at
a rate of 0, so that each computes them as it trains; `start` is the model that nobody has tuned.

    NAME_held_out_loss    mean over the held-out rows at the end
    NAME_held_out_gap     the same minus that of plain_fp32
    NAME_gain_share       by how much the held-out loss fell, over plain_fp32's fall; each fall is
                          from the start as computed in the same precision
    NAME_max_distance     largest |loss - plain_fp32's| of a step; NAME_mean_distance: their mean
    NAME_equal_steps      steps whose loss has the bits of plain_fp32's

With `--folder` model and losses are kept there, and a second run makes only what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import numpy as np
from transformers import Qwen3Config

from benchmarks.rivals.contestants import Contestant, WorkerFailed
from benchmarks.rivals.curves import REFERENCE, Curves, gaps
from benchmarks.rivals.real_text import (
    MODEL,
    Text,
    pretrain,
    read_text,
    steps_of,
    tokenize,
    train_tokenizer,
)
from benchmarks.rivals.subjects import qwen3
from benchmarks.rivals.workers.serving import Job
from megatrain.optim.learning_rate import LRSchedule

RATE, WARM_UP, ROWS, HELD_OUT_STEPS, PRETRAINING_STEPS = 2e-5, 0.1, 2, 32, 300
TARGETS = {
    "ours_fp32_max_distance": (0.0, 1e-4),
    "ours_bf16_gain_share": (0.98, 1.02),
    "ours_8bit_gain_share": (0.98, 1.02),
    "ours_fp8_gain_share": (0.95, 1.05),
}
"""Chosen before the first run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to train: a worker, its precision and its settings."""

    worker: str
    dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    order: str = "training"
    """The file of rows."""


SIDES = {
    REFERENCE: Side(worker="plain", dtype="float32"),
    "plain_bf16": Side(worker="plain", dtype="pure_bfloat16"),
    "deepspeed": Side(worker="deepspeed", dtype="bfloat16"),
    "ours_fp32": Side(worker="ours", dtype="float32"),
    "ours_bf16": Side(worker="ours", dtype="bfloat16"),
    "ours_8bit": Side(worker="ours", dtype="bfloat16", settings={"state": "8bit"}),
    "ours_fp8": Side(worker="ours", dtype="bfloat16", settings={"step": {"products": "fp8"}}),
    "other_order": Side(worker="plain", dtype="float32", order="other_order"),
    "start_fp32": Side(worker="plain", dtype="float32", order="held_out"),
    "start_bf16": Side(worker="plain", dtype="pure_bfloat16", order="held_out"),
}
ELSEWHERE = {"deepspeed"}
"""Workers that need their own environment. The others run in this one, with the same torch."""


def prepare(
    folder: Path,
    text: Text,
    num_steps: int,
    config: Qwen3Config,
    *,
    pretraining_steps: int = PRETRAINING_STEPS,
    held_out_steps: int = HELD_OUT_STEPS,
) -> Job:
    """Write the model and the tokens, and return the job that all sides have in common."""
    tokens = tokenize(text, train_tokenizer(text, config.vocab_size))
    start = folder / "start"
    if not (start / "config.json").exists():
        pretrain(start, tokens.pretraining, config, pretraining_steps)
    held_out = steps_of(tokens.held_out, held_out_steps, ROWS)
    trained = tokens.training[: num_steps * ROWS]
    other = np.random.default_rng(1).permutation(trained)
    for name, rows in (("training", trained), ("other_order", other)):
        np.save(folder / f"{name}.npy", np.concatenate([steps_of(rows, num_steps, ROWS), held_out]))
    np.save(folder / "held_out.npy", held_out)
    schedule = LRSchedule(peak=RATE, shape="cosine", num_steps=num_steps, warmup=WARM_UP)
    return Job(
        model=str(start),
        tokens=str(folder / "training.npy"),
        rates=[*map(schedule.rate, range(num_steps)), *[0.0] * held_out_steps],
        weight_decay=0.0,
        threads=1,
    )


def job_of(side: Side, job: Job) -> Job:
    """Return what one side does of the common job."""
    return replace(
        job,
        tokens=str(Path(job.tokens).with_name(f"{side.order}.npy")),
        rates=[0.0] if side.order == "held_out" else job.rates,
        dtype=side.dtype,
        settings=dict(side.settings),
    )


def losses_of(name: str, job: Job, folder: Path) -> list[float]:
    """Return the loss of every step of a side, from its file if the same job wrote one."""
    worker, kept = SIDES[name].worker, folder / f"{name}.json"
    path = job.write(folder / f"{name}.job.json")
    asked = path.read_text()
    if kept.exists() and (found := json.loads(kept.read_text()))["job"] == asked:
        return list(found["losses"])
    python = None if worker in ELSEWHERE else sys.executable
    with Contestant(worker, path, python=python) as contestant:
        contestant.ready()
        losses = [contestant.step().loss for _ in np.load(job.tokens)]
    kept.write_text(json.dumps({"job": asked, "losses": losses}))
    return losses


def compare(folder: Path, job: Job) -> tuple[Curves, dict[str, str]]:
    """Return the losses of every side, and why a side is left out, if its environment fails."""
    curves: Curves = {}
    left_out: dict[str, str] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        running = {
            name: pool.submit(losses_of, name, job_of(side, job), folder)
            for name, side in SIDES.items()
        }
        for name, future in running.items():
            try:
                curves[name] = future.result()
            except (WorkerFailed, CalledProcessError) as error:
                if SIDES[name].worker not in ELSEWHERE:
                    raise
                left_out[name] = str(error)
    return curves, left_out


def figures_of(curves: Curves, num_steps: int) -> dict[str, float]:
    """Return the figures of every side that was run."""
    starts = {name: statistics.mean(curves[name]) for name in ("start_fp32", "start_bf16")}
    ends = {
        name: statistics.mean(losses[num_steps:])
        for name, losses in curves.items()
        if name not in starts
    }
    gains = {
        name: starts["start_fp32" if SIDES[name].dtype == "float32" else "start_bf16"] - end
        for name, end in ends.items()
    }
    figures = {f"{name}_loss": loss for name, loss in starts.items()}
    for name, end in ends.items():
        figures[f"{name}_held_out_loss"] = end
        figures[f"{name}_held_out_gap"] = end - ends[REFERENCE]
        figures[f"{name}_gain_share"] = gains[name] / gains[REFERENCE]
        if SIDES[name].order == SIDES[REFERENCE].order:
            distances = [abs(gap) for gap in gaps(curves, name, num_steps)]
            figures[f"{name}_max_distance"] = max(distances)
            figures[f"{name}_mean_distance"] = statistics.mean(distances)
            figures[f"{name}_equal_steps"] = distances.count(0.0)
    return figures


def measure(folder: Path, num_steps: int) -> tuple[dict[str, Any], Curves]:
    """Return all figures and the losses they are of."""
    text = read_text()
    job = prepare(folder, text, num_steps, qwen3(**MODEL))
    curves, left_out = compare(folder, job)
    facts = {"python": sys.version.split()[0], "text": text.digest, "steps": num_steps}
    figures = {name: float(f"{x:.5g}") for name, x in figures_of(curves, num_steps).items()}
    return {**facts, **figures, "left_out": left_out, "targets": TARGETS}, curves


def main() -> None:
    """Run the comparison and print one JSON object, or a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--picture", type=Path, default=None, help="draw the curves here")
    parser.add_argument("--folder", type=Path, default=None, help="keep model and losses here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        figures, curves = measure(folder.resolve(), options.steps)
    if options.picture is not None:
        from benchmarks.rivals.accuracy_picture import draw

        draw(curves, figures, options.picture)
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
