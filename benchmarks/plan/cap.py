"""Runs under a memory limit that the kernel enforces: see plan.py.

Each is `megatrain train` in a control group of its own, whose limit is a share of what the plan of
the same run says it needs.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.control_group import memory_groups, train, train_capped
from megatrain.cli.demo import byte_tokenizer, write_demo

SHARES = (0.5, 0.7, 0.85, 0.95, 1.0, 1.05, 1.1, 1.2)
ALWAYS = 1.1
"""From this share on no run may be refused."""
NUM_STEPS = 2
RUNS: dict[str, tuple[tuple[int, int], list[str]]] = {
    "83M, clipped": ((1024, 6), []),
    "83M, updates in backward": ((1024, 6), ["train.max_grad_norm=null", "optim.state=fp32"]),
    "83M, fp32": ((1024, 6), ["model.dtype=fp32"]),
    "83M, large micro-batches": ((1024, 6), ["train.micro_batch_tokens=2048"]),
    "220M, clipped": ((1536, 8), []),
    "220M, updates in backward": ((1536, 8), ["train.max_grad_norm=null"]),
    "220M, moments in bf16": ((1536, 8), ["optim.state=bf16"]),
    "220M, moments in 8 bits": ((1536, 8), ["optim.state=8bit"]),
    "220M, a disk": ((1536, 8), ["optim.state=fp32", "memory.disk=."]),
}
"""Hidden size and layers, and changes to the config."""
CAP_TARGETS = {"died": 0, "refused_above": 0}


def measure_caps(
    names: Sequence[str] = tuple(RUNS), shares: Sequence[float] = SHARES
) -> dict[str, object]:
    """Return the figures with --cap."""
    parent = memory_groups()
    if parent is None:
        return {"skipped": "no control group for memory can be made here"}
    counts: Counter[str] = Counter()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            world = _World(Path(scratch) / "world", *RUNS[name])
            needed = world.needed_bytes()
            for share in shares:
                outcome = world.run_capped(parent, int(share * needed))
                counts[outcome] += 1
                counts["refused_above"] += outcome == "refused" and share >= ALWAYS
                rows.append({"run": name, "share": share, "outcome": outcome})
                print(rows[-1], f"of {needed >> 20} MiB", file=sys.stderr, flush=True)
            shutil.rmtree(world.folder)
    outcomes = ("finished", "refused", "stopped", "died", "refused_above")
    return {
        "starts": len(rows),
        **{outcome: counts[outcome] for outcome in outcomes},
        "rows": rows,
        "targets": CAP_TARGETS,
    }


class _World:
    """A model, rows and a config."""

    def __init__(self, folder: Path, size: tuple[int, int], changes: list[str]) -> None:
        self.folder = folder
        self._config = write_demo(folder, num_steps=NUM_STEPS)
        hidden, layers = size
        shutil.rmtree(folder / "model")
        tokenizer = byte_tokenizer()
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        self._changes = ["model.dtype=bf16", "data.eval=null", "eval.samples=0", *changes]

    def needed_bytes(self) -> int:
        """Return the host total of the plan, from a run without a limit."""
        run = train(*self._fresh())
        assert run.returncode == 0, run.stderr[-2000:]
        plan = json.loads((self.folder / "run" / "plan.json").read_text())
        return sum(line["num_bytes"] for line in plan["ledger"] if line["place"] == "host")

    def run_capped(self, parent: Path, limit_bytes: int) -> str:
        """Return what became of a run: finished, refused, stopped by itself, or died."""
        return train_capped(parent, limit_bytes, *self._fresh()).outcome

    def _fresh(self) -> tuple[list[str], dict[str, str]]:
        """Return arguments and environment of a run whose folder is new."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        return [str(self._config), *self._changes], {"MEGATRAIN_CACHE": f"{self.folder}/cache"}
