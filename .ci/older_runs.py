"""Makes run folders of the version that is imported, for later versions to resume.

    git worktree add ../older COMMIT          # ea46828 is 0.2.0
    PYTHONPATH=../older/src:../older python .ci/older_runs.py tests/run/older [KIND ...]

Each kind of run is trained twice: once to the end, and once stopped by a signal, half-way. The
archive holds the stopped run, the rows, and what the version itself made of them: the manifest and
metrics of the run that was not stopped, the loss and the exported bytes of the stopped one. Only
the command line is used, so that the script runs with any version; a disk that the plan would not
choose is forced by the version's own testkit. tests/run/test_older_versions.py reads the archives.
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
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

import megatrain
from megatrain.cli.demo import byte_tokenizer

PROGRAM = (sys.executable, "-m", "megatrain")
HOMES = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
"""Absolute: the runs are started in other folders."""
WITH_DISK = """\
from megatrain.__main__ import main
from testkit.tiers import forced_tier
with forced_tier("states"):
    main()
"""
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


class Kind(NamedTuple):
    """A kind of run: its settings besides model, data and folder, and how it is started."""

    settings: list[str]
    experts: bool = False
    pairs: bool = False
    ranks: int = 1
    on_disk: bool = False

    def train(self, *words: str) -> list[str]:
        """Return the command that trains."""
        program = [sys.executable, "-c", WITH_DISK] if self.on_disk else list(PROGRAM)
        ranks = ["--gpus", str(self.ranks)] if self.ranks > 1 else []
        return [*program, "train", "run.yaml", *ranks, *words, *self.settings]


KINDS: dict[str, Kind] = {
    "defaults": Kind(["data.max_length=64", f"train.steps={NUM_STEPS}"]),
    "fp32": Kind([
        "model.dtype=fp32", "data.packing=false", "save.best=true", *SMALL, *CHAT, *RATE,
    ]),
    "packed": Kind(["model.dtype=fp32", "data.packing=true", *SMALL, *CHAT, *RATE]),
    "experts": Kind([
        "model.dtype=fp32", "data.packing=false", "train.router_aux_loss=0.01",
        "model.frozen=[model.embed_tokens*]", "train.max_grad_norm=null", *SMALL, *CHAT, *RATE,
    ], experts=True),
    "options": Kind([
        "model.dtype=bf16", "data.packing=false", "memory.tape=host", "train.batch_rows=8",
        "model.add_tokens=[<|think|>]", "optim.state=8bit", f"train.steps={NUM_STEPS}", *CHAT,
        *RATE,
    ]),
    "adapters": Kind(["lora.rank=2", "lora.dropout=0.1", *SMALL, *CHAT]),
    "preferences": Kind(["model.dtype=fp32", "loss=dpo", *SMALL, *CHAT], pairs=True),
    "disk": Kind(["model.dtype=fp32", "data.packing=false", "memory.disk=.", *SMALL, *CHAT, *RATE],
                 on_disk=True),
    "ranks": Kind(["model.dtype=fp32", "data.packing=false", *SMALL, *CHAT, *RATE], ranks=2),
}  # fmt: skip


def write_model(folder: Path, *, experts: bool) -> None:
    """Write a random model of a few thousand parameters, with a tokenizer of bytes."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = SIZES | {"vocab_size": len(tokenizer), "tie_word_embeddings": not experts}
    config = MixtralConfig(**sizes, num_local_experts=4) if experts else LlamaConfig(**sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def write_rows(folder: Path) -> None:
    """Write answers and the same as pairs, each with a rejected answer."""
    draw = random.Random(0)
    rows: dict[str, list[Any]] = {"rows.jsonl": [], "pairs.jsonl": []}
    for _ in range(60):
        first, second = draw.randrange(10**4), draw.randrange(10 ** draw.randrange(1, 6))
        asked, answer = f"{first} + {second}", str(first + second)
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        rows["rows.jsonl"].append({"messages": turns})
        rows["pairs.jsonl"].append({"prompt": asked, "chosen": answer, "rejected": answer[::-1]})
    for name, written in rows.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in written))


def plain_digest(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """Return a hash of one backward of plain PyTorch: equal where a processor rounds equally.

    Processors that agree in fp32 may differ in bf16, for which some have units of their own.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = torch.arange(4, 68).reshape(1, 64)
    model(input_ids=ids, labels=ids).loss.backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    exact = (grad.float().numpy().tobytes() for grad in grads)
    return hashlib.sha256(b"".join(exact)).hexdigest()


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "MEGATRAIN_CACHE": str(folder.parent / "cache"),
        "PYTHONPATH": os.pathsep.join(HOMES),
    }


def call(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


def train_and_stop(folder: Path, command: list[str]) -> None:
    """Train, and send SIGTERM once the run has written some lines."""
    process = subprocess.Popen(command, cwd=folder, env=environment(folder))
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < STOP_AFTER:
        assert process.poll() is None, "the run ended early"
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130, "the run ended before the signal"


def make(name: str, folder: Path) -> None:
    """Fill `folder` with a run of this kind, stopped, and with what came of it."""
    kind = KINDS[name]
    folder.mkdir()
    write_model(folder / "model", experts=kind.experts)
    write_rows(folder)
    rows = "pairs.jsonl" if kind.pairs else "rows.jsonl"
    (folder / "run.yaml").write_text(f"model: model\ndata: {rows}\nmemory: {{device: cpu}}\n")
    call(folder, *kind.train("save.dir=whole"))
    train_and_stop(folder, kind.train("save.dir=run"))
    call(folder, *PROGRAM, "export", "run", "exported")
    evaluated = call(folder, *PROGRAM, "eval", "run", "rows.jsonl")
    whole = (folder / "whole" / "last").resolve()
    (exported,) = (folder / "exported").glob("*.safetensors")
    made = {
        "version": megatrain.__version__,
        "settings": kind.settings,
        "ranks": kind.ranks,
        "plain_digest": plain_digest(folder / "model"),
        "bf16_digest": plain_digest(folder / "model", torch.bfloat16),
        "manifest": json.loads((whole / "manifest.json").read_text()),
        "metrics": [json.loads(x) for x in (folder / "whole/metrics.jsonl").open()],
        "exported_sha256": hashlib.sha256(exported.read_bytes()).hexdigest(),
        "eval": evaluated,
    }
    (folder / "made.json").write_text(json.dumps(made, indent=1) + "\n")
    for each in ("whole", "exported"):
        shutil.rmtree(folder / each)


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
