"""A packed step against that of another version: documents attended to alone, and one flat row.

    python -m benchmarks.packed --before PATH [--rounds N] [--json]

A Llama of width 256 with 4 layers in fp32, steps of 8192 tokens in micro-batches of 4096, rows of
at most 2048 tokens packed from documents of log-normal lengths. `--before` is the tree of another
commit. Both sides get the same documents, and lay them out as they do. They take turns, each in a
new process with one thread, and who begins alternates; a figure is the median over rounds of
the ratio within a round.

    step_over_before      seconds of a step, forward and backward, over those of the other version
    time_over_before      likewise of processor time, which a busy machine changes less
    num_micro             micro-batches of a step: before, and now
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig

# Only what another version has too.
from megatrain.data.steps.order import InOrder
from megatrain.data.steps.steps import Position, Steps
from megatrain.engine.engine import Engine
from megatrain.memory.kinds import Kind, store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder

TREE = Path(__file__).parents[1]
VOCABULARY = 4096
ROW_TOKENS, MICRO_TOKENS, STEP_TOKENS = 2048, 4096, 8192
NUM_DOCUMENTS = 400


class RandomDocuments:
    """Documents of log-normal lengths, each a row of the data."""

    def __init__(self) -> None:
        drawn = np.random.default_rng(0).lognormal(np.log(ROW_TOKENS / 6), 0.8, NUM_DOCUMENTS)
        self.lengths: NDArray[np.int64] = np.clip(drawn.astype(np.int64), 16, ROW_TOKENS)
        self.row_starts: NDArray[np.int64] = np.arange(NUM_DOCUMENTS + 1)

    def tokens(self, document: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        length = int(self.lengths[document])
        drawn = np.random.default_rng(document).integers(3, VOCABULARY, length, dtype=np.int32)
        return drawn, np.ones(length, dtype=np.bool_)


def _engine() -> Engine:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=ROW_TOKENS,
    )
    decoder = build_decoder(config, "fp32")
    store = Store(build_layout(decoder.blocks, store_kinds((), waits=True)))
    generator = torch.Generator().manual_seed(0)
    for param in decoder.params:
        weight = store.param(param.name, Kind.HI)
        if weight.dim() > 1:
            weight.normal_(0.0, 0.02, generator=generator)
        else:
            weight.fill_(1.0)
    return Engine(decoder, store)


def one_side() -> dict[str, float]:
    """Return what a step takes in this process, with the version that it imports."""
    torch.set_num_threads(1)
    steps = Steps(
        RandomDocuments(),
        InOrder(NUM_DOCUMENTS),
        batch_tokens=STEP_TOKENS,
        micro_batch_tokens=MICRO_TOKENS,
        max_length=ROW_TOKENS,
    )
    first, position = steps.batch(Position())
    second, _ = steps.batch(position)
    with _engine() as engine:
        engine.step(first)  # to warm up
        seconds, spent = time.perf_counter(), time.process_time()
        engine.step(second)
        engine.settle()
        seconds, spent = time.perf_counter() - seconds, time.process_time() - spent
    return {"step": seconds, "time": spent, "num_micro": len(second)}


def _run(tree: Path) -> dict[str, float]:
    path = os.pathsep.join([str(tree / "src"), str(TREE)])
    command = [sys.executable, "-m", "benchmarks.packed", "--side"]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=TREE, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(before: Path, num_rounds: int) -> dict[str, object]:
    """Return the figures."""
    rounds = []
    for number in range(num_rounds):
        trees = [before, TREE] if number % 2 == 0 else [TREE, before]
        found = {tree: _run(tree) for tree in trees}
        rounds.append((found[before], found[TREE]))
    ratios = {
        name: [round(now[name] / old[name], 4) for old, now in rounds] for name in ("step", "time")
    }
    return {
        "step_over_before": statistics.median(ratios["step"]),
        "time_over_before": statistics.median(ratios["time"]),
        "rounds": ratios,
        "num_micro": [int(side["num_micro"]) for side in rounds[0]],
        "before_s": statistics.median(old["step"] for old, _ in rounds),
        "now_s": statistics.median(now["step"] for _, now in rounds),
        "targets": {"step_over_before": 0.9},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="the tree of another commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    options = parser.parse_args()
    if options.side:
        print(json.dumps(one_side()))
        return
    if options.before is None:
        parser.error("--before: give the tree of another commit")
    figures = measure(options.before.resolve(), options.rounds)
    print(json.dumps(figures, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
