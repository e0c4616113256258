"""One long row under a memory limit that the kernel enforces, with tiles and without.

    python -m benchmarks.long_row [--json] [--tokens 32k] [--hidden 1024] [--tile 1024]

A Llama of two layers of real width (hidden 1024, a vocabulary of 4096, random weights, fp32) that
declares an eighth of the positions trains one step on a row of text, as a real `megatrain train`
with model.rope. The limit of the control group is what the plan says that the run needs with tiles,
its reserve included.

    with_tiles, without    what became of the run: finished; refused by the plan before it begins
    plan_mib               the limit
    peak_mib               most that the group held, with files that the kernel cached for it
    untiled_mib            what the plan says that the run needs without tiles
    seconds                of the step
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.control_group import memory_groups, train_capped
from megatrain.cli.demo import byte_tokenizer
from megatrain.config.quantities import read_tokens
from megatrain.files import make_folder, write_file
from megatrain.planning.search import HOST_HEADROOM

TARGETS = {"with_tiles": "finished", "without": "refused"}
STRETCH = 8
"""How many times the model's positions the row has."""
CONFIG = """\
model: {{name_or_path: {folder}/model, dtype: fp32, rope: {{type: yarn, factor: {stretch}}}}}
data: {{train: {folder}/row.jsonl, max_length: {tokens}, train_on: all}}
train: {{steps: 1, batch_tokens: {tokens}}}
memory: {{device: cpu, tile_tokens: {tile}}}
eval: {{samples: 0}}
save: {{dir: {folder}/run}}
"""
PLAN = """\
import sys
from megatrain.cli import app
from megatrain.config import load_config
from megatrain.run.trainer import Trainer

with Trainer(load_config(sys.argv[1], sys.argv[2:]), dry_run=True) as trainer:
    print(trainer.plan.ledger.total("host"))
"""
"""Prints the host memory of a plan, from a process that has imported what `megatrain` does."""


def write_world(folder: Path, *, tokens: int, hidden: int, tile: int) -> Path:
    """Write a model, a row of so many tokens and a config; return the config's path."""
    make_folder(folder)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=2,
        num_attention_heads=hidden // 128,  # half the usual width, for the time of attention
        num_key_value_heads=max(1, hidden // 512),
        head_dim=64,
        max_position_embeddings=tokens // STRETCH,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    letters = random.Random(0).choices("abcdefgh ", k=tokens - 1)  # and the end of the text
    write_file(folder / "row.jsonl", json.dumps({"text": "".join(letters)}).encode() + b"\n")
    text = CONFIG.format(folder=folder, tokens=tokens, tile=tile, stretch=STRETCH)
    write_file(folder / "run.yaml", text.encode())
    return folder / "run.yaml"


def needed_bytes(config: Path, *changes: str) -> int:
    """Return what the plan says that a run needs, with the reserve that it keeps free."""
    command = [sys.executable, "-c", PLAN, str(config), *changes]
    variables = os.environ | _environment(config)
    run = subprocess.run(command, capture_output=True, text=True, env=variables, check=True)
    return int(float(run.stdout) * HOST_HEADROOM)


def measure(*, tokens: int, hidden: int, tile: int) -> dict[str, object]:
    """Return the figures."""
    parent = memory_groups()
    if parent is None:
        return {"skipped": "no control group for memory can be made here"}
    with tempfile.TemporaryDirectory() as scratch:
        config = write_world(Path(scratch) / "world", tokens=tokens, hidden=hidden, tile=tile)
        limit = needed_bytes(config)
        untiled = needed_bytes(config, "memory.tile_tokens=null")
        changes = {"without": ["memory.tile_tokens=null"], "with_tiles": []}
        runs = {
            name: train_capped(
                parent,
                limit,
                [str(config), f"save.dir={scratch}/{name}", *changed],
                _environment(config),
            )
            for name, changed in changes.items()
        }
    seconds = re.search(r"step 1/1 .* ([\d.]+) s ", runs["with_tiles"].text)
    peak = runs["with_tiles"].peak_bytes
    return {
        "tokens": tokens,
        "hidden": hidden,
        "tile_tokens": tile,
        **{name: run.outcome for name, run in runs.items()},
        "plan_mib": limit >> 20,
        "peak_mib": None if peak is None else peak >> 20,
        "untiled_mib": untiled >> 20,
        "seconds": None if seconds is None else float(seconds[1]),
        "targets": TARGETS,
    }


def _environment(config: Path) -> dict[str, str]:
    return {"MEGATRAIN_CACHE": str(config.parent / "cache")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=read_tokens, default=32 << 10, help="length of the row")
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model")
    parser.add_argument("--tile", type=read_tokens, default=1024, help="memory.tile_tokens")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    options = parser.parse_args()
    figures = measure(tokens=options.tokens, hidden=options.hidden, tile=options.tile)
    print(json.dumps(figures, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
