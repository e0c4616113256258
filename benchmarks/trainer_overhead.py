"""What the trainer adds to a step: `python -m benchmarks.step --trainer`.

A run of the trainer and a bare engine, each with a Llama of 58M random parameters of its own, take
turns on the same batches: whenever the loop's engine is done with a step, the bare one takes it
too. A cycle of the loop is all from the end of the bare step to the end of its own next one:
metrics, their lines in files and on the console, waiting for data, and the step itself.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.config import Config
from megatrain.disk.hf import load_model
from megatrain.optim.adamw import AdamW
from megatrain.pipeline.batch import MicroBatch, StepResult
from megatrain.pipeline.engine import Engine
from megatrain.trainer.dataset import CACHE
from megatrain.trainer.demo import byte_tokenizer
from megatrain.trainer.loop import Trainer

TARGETS = {"overhead_share": 0.02}
BATCH_TOKENS = 2048
WARM_UP = 2
"""Steps that count for nothing."""

Clocks = tuple[float, float]
"""Seconds, and seconds of processor time."""


def measure_trainer(num_threads: int, num_rounds: int) -> dict[str, object]:
    """Return the figures with --trainer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ[CACHE] = str(folder / "cache")
        config = _write_run(folder, num_rounds + WARM_UP)
        home = load_model(folder / "model")
        optimizer = AdamW(
            home.store, learning_rate=1e-5, max_grad_norm=1.0, num_threads=max(1, num_threads // 2)
        )
        bare = Engine(home.decoder, home.store, optimizer=optimizer, update="late")
        with bare, Trainer(config) as trainer:
            turns = Turns(trainer.engine, bare)
            trainer.engine = turns  # type: ignore[assignment]
            trainer.train()
        num_params = home.store.layout.num_params
    return {
        "params": num_params,
        "tokens": BATCH_TOKENS,
        "threads": num_threads,
        "rounds": num_rounds,
        **turns.figures(),
        "targets": TARGETS,
    }


class Turns:
    """Stands in for the loop's engine, and lets the bare one take each step after it."""

    def __init__(self, engine: Engine, bare: Engine) -> None:
        self._engine, self._bare = engine, bare
        self._began = _clocks()
        self._cycles: list[Clocks] = []
        self._own: list[Clocks] = []
        self._alone: list[Clocks] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def step(self, batch: Sequence[MicroBatch]) -> StepResult:
        begin = _clocks()
        result = self._engine.step(batch)
        end = _clocks()
        self._bare.step(batch)
        bare_end = _clocks()
        self._cycles.append(_between(self._began, end))
        self._own.append(_between(begin, end))
        self._alone.append(_between(end, bare_end))
        self._began = _clocks()
        return result

    def figures(self) -> dict[str, object]:
        """Return medians over the rounds after the warm-up.

        overhead_share      seconds of a cycle that were spent outside the engine
        loop_over_engine    processor time of a cycle, other threads included, over that of the
                            bare step that follows it: whatever else the machine does
        """
        cycles, own, alone = (part[WARM_UP:] for part in (self._cycles, self._own, self._alone))
        outside = [cycle[0] - step[0] for cycle, step in zip(cycles, own, strict=True)]
        shares = [part / cycle[0] for part, cycle in zip(outside, cycles, strict=True)]
        ratios = [cycle[1] / bare[1] for cycle, bare in zip(cycles, alone, strict=True)]
        return {
            "cycle_s": round(statistics.median(cycle[0] for cycle in cycles), 3),
            "bare_s": round(statistics.median(bare[0] for bare in alone), 3),
            "bare_cpu_s": round(statistics.median(bare[1] for bare in alone), 3),
            "outside_ms": round(1e3 * statistics.median(outside), 2),
            "overhead_share": round(statistics.median(shares), 5),
            "loop_over_engine": round(statistics.median(ratios), 4),
        }


def _clocks() -> Clocks:
    return time.perf_counter(), time.process_time()


def _between(begin: Clocks, end: Clocks) -> Clocks:
    return end[0] - begin[0], end[1] - begin[1]


def _write_run(folder: Path, num_steps: int) -> Config:
    """Write a model and rows; return a config that trains on them."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    config = LlamaConfig(
        hidden_size=640,
        intermediate_size=1728,
        num_hidden_layers=10,
        num_attention_heads=10,
        num_key_value_heads=10,
        vocab_size=8192,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "model")
    words = ["the", "lamp", "burns", "while", "ships", "pass", "by", "night"]
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(40 * num_steps):
            said = " ".join(words[(number * k + k) % 8] for k in range(1, 12 + number % 30))
            file.write(json.dumps({"text": f"{number} {said}"}) + "\n")
    return Config.model_validate(
        {
            "model": str(folder / "model"),
            "data": {"train": str(folder / "rows.jsonl"), "max_length": 512, "train_on": "all"},
            "train": {"steps": num_steps, "batch_tokens": BATCH_TOKENS},
            "memory": {"device": "cpu"},
            "eval": {"every": None, "samples": 0},
            "save": str(folder / "run"),
        }
    )
