"""A run folder as a trainer would leave it, made up but alike."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONFIG = """\
model:
  name_or_path: Qwen/Qwen3-8B
  dtype: bf16
data:
  train: [{path: train.jsonl, format: auto}]
  max_length: 2048
  packing: true
train:
  epochs: 1
  batch_tokens: 131072
  max_grad_norm: 1.0
  seed: 42
optim:
  name: adamw
  learning_rate: %s
  schedule: cosine
  warmup: 0.03
"""
GIB = 2**30
PLAN = {
    "ledger": [
        {"place": "pinned", "purpose": "weights", "num_bytes": int(15.3 * GIB)},
        {"place": "host", "purpose": "masters, lower half", "num_bytes": int(15.3 * GIB)},
        {"place": "host", "purpose": "moments", "num_bytes": int(61.0 * GIB)},
        {"place": "pinned", "purpose": "gradients", "num_bytes": int(15.3 * GIB)},
        {"place": "host", "purpose": "tape", "num_bytes": int(9.1 * GIB)},
        {"place": "host", "purpose": "load buffers", "num_bytes": 64 * 2**20},
        {"place": "device", "purpose": "slots", "num_bytes": int(2.4 * GIB)},
        {"place": "device", "purpose": "gradient slots", "num_bytes": int(3.1 * GIB)},
        {"place": "device", "purpose": "activations of one block", "num_bytes": int(6.2 * GIB)},
        {"place": "device", "purpose": "chunk of logits", "num_bytes": int(1.2 * GIB)},
    ],
    "measured": {"host_peak_bytes": int(117.4 * GIB), "device_peak_bytes": int(12.4 * GIB)},
    "predicted": {"step_s": 16.2, "roofline": "compute"},
    "ops": [
        {"op": "backward", "measured_s": 10.2, "predicted_s": 9.9},
        {"op": "update", "measured_s": 6.4, "predicted_s": 6.1},
    ],
}
MACHINE = {
    "device": "NVIDIA GeForce RTX 4090",
    "device_bytes": 24 * GIB,
    "host_bytes": 256 * GIB,
    "num_cores": 32,
    "copy_in_bytes_per_s": 25.1e9,
    "torch": "2.13.0",
    "python": "3.11.9",
    "pinning": True,
}
DATA_CARD = {
    "rows": 51_760,
    "tokens": 21_384_992,
    "trained_tokens": 9_823_114,
    "length": {"p50": 388, "p95": 1204, "p99": 1811, "max": 2048},
    "dropped": {"longer than max_length": 412, "no trained token": 3},
}
SAMPLES = [
    ("Why is the sky blue?", "The sky is blue. The sky is blue. The sky is blue. The sky is",
     "Sunlight is scattered by the air, and short waves are scattered most.\n\nSo blue reaches us "
     "from every side, while red goes nearly straight on.<|im_end|>"),
    ("Write a function that adds two numbers.", "Write a function that subtracts two numbers.\n",
     "```python\ndef add(a: int, b: int) -> int:\n\treturn a + b\n```"),
    ("\u0639\u0627\u0635\u0645\u0629 \u0641\u0631\u0646\u0633\u0627\u061f", "",
     "\u0628\u0627\u0631\u064a\u0633."),
]  # fmt: skip


def write_run(
    folder: Path, *, num_steps: int = 2000, seed: int = 0, learning_rate: float = 1e-5,
    without: frozenset[str] = frozenset(),
) -> Path:  # fmt: skip
    """Write a run folder, all files but those named, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = [
        {"step": step, "prompt": prompt, "text": text}
        for prompt, before, after in SAMPLES
        for step, text in ((0, before), (num_steps, after))
    ]
    texts = {
        "config.yaml": CONFIG % learning_rate,
        "machine.json": json.dumps(MACHINE),
        "plan.json": json.dumps(PLAN),
        "data_card.json": json.dumps(DATA_CARD),
        "metrics.jsonl": jsonl(metrics(num_steps, random.Random(seed), learning_rate)),
        "samples.jsonl": jsonl(samples),
    }
    for name, text in texts.items():
        if name not in without:
            (folder / name).write_text(text)
    return folder


def jsonl(objects: Iterator[Mapping[str, Any]] | list[dict[str, Any]]) -> str:
    return "".join(json.dumps(one) + "\n" for one in objects)


def metrics(num_steps: int, rng: random.Random, learning_rate: float) -> Iterator[dict[str, Any]]:
    """Yield lines with noise, a spike at a third, and a step that is not finite at two thirds."""
    every = max(1, num_steps // 10)
    total = 0
    yield {"step": 0, "eval_loss": 2.71, "eval_perplexity": math.exp(2.71)}
    for step in range(1, num_steps + 1):
        done = step / num_steps
        loss = 1.32 + 1.4 * math.exp(-6 * done) + rng.gauss(0, 0.07)
        norm = 0.8 + 2 * math.exp(-9 * done) + abs(rng.gauss(0, 0.15))
        if step == num_steps // 3:
            loss, norm = loss + 2.4, 38.0
        lost = step == 2 * num_steps // 3
        split = {
            "compute": 14.1 + rng.gauss(0, 0.2),
            "fetch": abs(rng.gauss(0.6, 0.2)),
            "drain": abs(rng.gauss(0.1, 0.05)),
            "update": abs(rng.gauss(1.8, 0.3)),
            "data": 0.05 + (4.0 if step == 1 else 0.0),
        }
        seconds = sum(split.values()) + 0.3
        total += 131_072
        warm = min(1.0, done / 0.03)
        yield {
            "step": step,
            "loss": math.nan if lost else loss,
            "grad_norm": math.inf if lost else norm,
            "learning_rate": learning_rate * warm * (0.5 + 0.5 * math.cos(math.pi * done)),
            "num_tokens": 131_072,
            "num_valid_tokens": 60_000,
            "total_tokens": total,
            "seconds": seconds,
            "tokens_per_s": 131_072 / seconds,
            "split": split,
            "applied": not lost,
        }
        if step % every == 0:
            loss = 1.36 + 1.35 * math.exp(-6 * done)
            yield {"step": step, "eval_loss": loss, "eval_perplexity": math.exp(loss)}
