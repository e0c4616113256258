"""Peak host memory of TRL's trainers, as they are and streamed, on the CPU in bf16.

    python -m proofs.trainers.host_bytes --json

Each run is a process of its own: two steps of two micro-batches over a random Llama of 26M
parameters, with `bf16=True`, the default of TRL. Its figure is how far the process's peak grew from
before the trainer was made, in bytes per parameter: weights, gradients, moments, and all else.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from megatrain.cli.demo import byte_tokenizer

SIDES = ("theirs", "ours")
NAMES = ("sft", "dpo", "kto", "reward", "grpo")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--case", choices=NAMES, action="append", help="only this one")
    parser.add_argument("--run", nargs=3, metavar=("CASE", "SIDE", "FOLDER"), help="in a process")
    options = parser.parse_args()
    if options.run:
        with redirect_stdout(sys.stderr):
            grown = _grown(*options.run)
        print(grown)
        return
    found: dict[str, dict[str, float]] = {}
    for name in options.case or NAMES:
        with tempfile.TemporaryDirectory(prefix="megatrain-trainers-") as path:
            count = _write_model(Path(path, "model"), scores=name == "reward")
            found[name] = {side: round(_run(name, side, path) / count, 2) for side in SIDES}
        if not options.json:
            print(name, found[name], flush=True)
    if options.json:
        print(json.dumps({"bytes_per_parameter": found}))


def _write_model(folder: Path, *, scores: bool) -> int:
    """Write the model; return how many parameters it has."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=8, vocab_size=320,
        num_attention_heads=8, num_key_value_heads=8, num_labels=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return sum(param.numel() for param in model.parameters())


def _run(name: str, side: str, folder: str) -> int:
    command = [sys.executable, "-m", "proofs.trainers.host_bytes", "--run", name, side, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}, {side}: {done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def _grown(name: str, side: str, folder: str) -> int:
    """Return by how many bytes the peak of this process grows in a run."""
    from proofs.trainers.cases import CASES
    from proofs.trainers.sides import make_trainer

    Path(folder, side).mkdir()
    before = _peak()
    trainer = make_trainer(
        CASES[name],
        Path(folder, "model"),
        Path(folder, side),
        is_streamed=side == "ours",
        bf16=True,
        max_steps=2,
    )
    trainer.train()
    return _peak() - before


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
