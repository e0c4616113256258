"""What the trainer adds to a step: `python -m benchmarks.step --trainer`.

A run of the trainer and a bare engine, each with a Llama of 58M random parameters of its own, take
turns on the same batches: whenever the loop takes a step, the bare engine takes it too, and who
begins alternates. A cycle of the loop is its step and all that it does between two of them:
metrics, their lines in files and on the console, waiting for data.
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

from megatrain.batch import MicroBatch
from megatrain.cache import CACHE_VARIABLE
from megatrain.cli.demo import byte_tokenizer
from megatrain.config import Config
from megatrain.disk.hf.model import load_model
from megatrain.engine.engine import Engine, Says
from megatrain.engine.results import StepResult
from megatrain.optim.adamw import AdamW
from megatrain.run.trainer import Trainer

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
        os.environ[CACHE_VARIABLE] = str(folder / "cache")
        config = _write_run(folder, num_rounds + WARM_UP)
        home = load_model(folder / "model")
        optimizer = AdamW(
            learning_rate=1e-5, max_grad_norm=1.0, num_threads=max(1, num_threads // 2)
        )
        bare = Engine(home.decoder, home.store, optimizer=optimizer)
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
        self._left = _clocks()
        self._rounds: list[tuple[Clocks, Clocks, Clocks]] = []  # outside, the loop's step, bare

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def step(self, batch: Sequence[MicroBatch], says: Says | None = None) -> StepResult:
        outside = _since(self._left)
        spent: dict[Engine, Clocks] = {}
        results: dict[Engine, StepResult] = {}
        engines = [self._engine, self._bare]
        for engine in engines if len(self._rounds) % 2 else reversed(engines):
            begin = _clocks()
            results[engine] = engine.step(batch, says)
            spent[engine] = _since(begin)
        self._rounds.append((outside, spent[self._engine], spent[self._bare]))
        self._left = _clocks()
        return results[self._engine]

    def figures(self) -> dict[str, object]:
        """Return medians over the rounds after the warm-up.

        overhead_share      seconds of a cycle that were spent outside the engine
        loop_over_engine    processor time of a cycle, other threads included, over that of the
                            bare step: whatever else the machine does
        """
        rounds = self._rounds[WARM_UP:]
        shares = [out[0] / (out[0] + own[0]) for out, own, _ in rounds]
        ratios = [(out[1] + own[1]) / bare[1] for out, own, bare in rounds]
        return {
            "cycle_s": round(statistics.median(out[0] + own[0] for out, own, _ in rounds), 3),
            "bare_s": round(statistics.median(bare[0] for _, _, bare in rounds), 3),
            "bare_cpu_s": round(statistics.median(bare[1] for _, _, bare in rounds), 3),
            "outside_ms": round(1e3 * statistics.median(out[0] for out, _, _ in rounds), 2),
            "overhead_share": round(statistics.median(shares), 5),
            "loop_over_engine": round(statistics.median(ratios), 4),
        }


def _clocks() -> Clocks:
    return time.perf_counter(), time.process_time()


def _since(begin: Clocks) -> Clocks:
    now = _clocks()
    return now[0] - begin[0], now[1] - begin[1]


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
