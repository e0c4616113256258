"""Makes run folders of the version that is imported, for later versions to resume.

    git worktree add ../older COMMIT
    PYTHONPATH=../older/src python .ci/older_runs.py tests/run/older

Each kind of run is trained twice: once to the end, and once stopped by a signal, half-way. The
archive holds the stopped run, the rows, and what the version itself made of them: the manifest and
metrics of the run that was not stopped, the loss and the exported bytes of the stopped one. Only
the command line is used, so that the script runs with any version.
tests/run/test_older_versions.py reads the archives.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import megatrain
from megatrain.cli.demo import byte_tokenizer

PROGRAM = (sys.executable, "-m", "megatrain")
SIZES: dict[str, Any] = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
NUM_STEPS = 40
STOP_AFTER = 12
"""Lines of metrics; the run ends a few steps later."""
SMALL = [f"train.steps={NUM_STEPS}", "train.batch_tokens=192", "train.micro_batch_tokens=64"]
CHAT = ["data.max_length=64", "data.eval=0.1", "eval.every=10", "eval.samples=1"]
RATE = ["optim.learning_rate=1e-2", "optim.warmup=2"]
KINDS: dict[str, list[str]] = {
    "defaults": ["data.max_length=64", f"train.steps={NUM_STEPS}", "optim.learning_rate=1e-2"],
    "fp32": ["model.dtype=fp32", "data.packing=false", "save.best=true", *SMALL, *CHAT, *RATE],
    "packed": ["model.dtype=fp32", "data.packing=true", *SMALL, *CHAT, *RATE],
    "experts": [
        "model.dtype=fp32", "data.packing=false", "train.router_aux_loss=0.01",
        "model.frozen=[model.embed_tokens*]", "train.max_grad_norm=null", *SMALL, *CHAT, *RATE,
    ],
    "options": [
        "model.dtype=bf16", "data.packing=false", "memory.tape=host", "train.batch_rows=8",
        "model.add_tokens=[<|think|>]", f"train.steps={NUM_STEPS}", *CHAT, *RATE,
        "memory.gather_embedding=false",  # of 0.1 alone
    ],
}  # fmt: skip
"""Settings by kind of run, besides model, data and folder."""


def write_model(folder: Path, *, experts: bool) -> None:
    """Write a random model of a few thousand parameters, with a tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = SIZES | {"vocab_size": len(tokenizer), "tie_word_embeddings": not experts}
    config = MixtralConfig(**sizes, num_local_experts=4) if experts else LlamaConfig(**sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def write_rows(path: Path) -> None:
    draw = random.Random(0)
    rows = []
    for _ in range(60):
        first, second = draw.randrange(10**4), draw.randrange(10 ** draw.randrange(1, 6))
        turns = [{"role": "user", "content": f"{first} + {second}"}]
        turns.append({"role": "assistant", "content": str(first + second)})
        rows.append(json.dumps({"messages": turns}) + "\n")
    path.write_text("".join(rows))


def plain_digest(folder: Path) -> str:
    """Return a hash of one backward of plain PyTorch: equal where a processor rounds equally."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(4, 68).reshape(1, 64)
    model(input_ids=ids, labels=ids).loss.backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return hashlib.sha256(b"".join(grad.numpy().tobytes() for grad in grads)).hexdigest()


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "MEGATRAIN_CACHE": str(folder.parent / "cache")}


def call(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*PROGRAM, *arguments], cwd=folder, env=environment(folder), check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout


def train_and_stop(folder: Path, settings: list[str]) -> None:
    """Train, and send SIGTERM once the run has written some lines."""
    process = subprocess.Popen(
        [*PROGRAM, "train", "run.yaml", *settings], cwd=folder, env=environment(folder)
    )
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < STOP_AFTER:
        assert process.poll() is None, "the run ended early"
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130, "the run ended before the signal"


def make(kind: str, folder: Path) -> None:
    """Fill `folder` with a run of this kind, stopped, and with what came of it."""
    folder.mkdir()
    write_model(folder / "model", experts=kind == "experts")
    write_rows(folder / "rows.jsonl")
    (folder / "run.yaml").write_text("model: model\ndata: rows.jsonl\nmemory: {device: cpu}\n")
    settings = KINDS[kind]
    call(folder, "train", "run.yaml", "save.dir=whole", *settings)
    train_and_stop(folder, ["save.dir=run", *settings])
    call(folder, "export", "run", "exported")
    evaluated = call(folder, "eval", "run", "rows.jsonl")
    whole = (folder / "whole" / "last").resolve()
    exported = (folder / "exported" / "model.safetensors").read_bytes()
    made = {
        "version": megatrain.__version__,
        "settings": settings,
        "plain_digest": plain_digest(folder / "model"),
        "manifest": json.loads((whole / "manifest.json").read_text()),
        "metrics": [json.loads(x) for x in (folder / "whole/metrics.jsonl").open()],
        "exported_sha256": hashlib.sha256(exported).hexdigest(),
        "eval": evaluated,
    }
    (folder / "made.json").write_text(json.dumps(made, indent=1) + "\n")
    for name in ("whole", "exported"):
        shutil.rmtree(folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("to", type=Path)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    given = parser.parse_args()
    to = given.to / megatrain.__version__
    to.mkdir(parents=True, exist_ok=True)
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as scratch:
            make(kind, Path(scratch, kind))
            with tarfile.open(to / f"{kind}.tar.xz", "w:xz") as archive:
                archive.add(Path(scratch, kind), kind)
        print(f"{to / kind}.tar.xz: {(to / f'{kind}.tar.xz').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
