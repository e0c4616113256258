"""Distillation against TRL's GKDTrainer: losses of twenty steps on the same rows, in fp32.

    python -m proofs.distillation --json
    python -m proofs.distillation --memory

TRL is an oracle that is not ours, and no dependency: run this in its own environment, which has
`trl` from PyPI beside MegaTrain's requirements. GKDTrainer takes twenty steps of AdamW with its
own teacher beside the student, over the vocabulary. The rows that it saw, in their order, are then
the data of a run with `loss: {name: distill}`, whose teacher is streamed before the first step and
whose scores come from a file. For each divergence the loss of each step must agree within 1e-5.
Ends with 1 if one differs.

Key `loss_difference`: the largest over all cases and steps.

With --memory, which needs no TRL, a run with a teacher of 1 GB that is far larger than its student
is started as a process: `host_ratio` is the host memory of its plan over what was resident at most.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatrain.choices import Divergence
from megatrain.cli.demo import byte_tokenizer
from megatrain.config import Config
from megatrain.losses.head import IGNORED
from megatrain.run.trainer import Trainer
from proofs.side_by_side import quiet_arguments
from testkit.families import save_tiny
from testkit.runs import write_model

NUM_STEPS, NUM_ROWS, MOST_TOKENS, RATE = 20, 4, 24, 1e-3
TOKENS = 320
"""The vocabulary of both models."""
BETAS: dict[Divergence, float] = {"forward": 0.0, "reverse": 1.0, "jsd": 0.5}
"""GKDTrainer's name for each divergence."""
TOLERANCE = 1e-5
MEMORY_TOLERANCE = 0.03


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    parser.add_argument("--memory", action="store_true", help="compare a plan with its run")
    options = parser.parse_args()
    if options.memory:
        with tempfile.TemporaryDirectory() as folder:
            found = host_memory(Path(folder))
        print(json.dumps(found))
        sys.exit(abs(found["host_ratio"] - 1) > MEMORY_TOLERANCE)
    if importlib.util.find_spec("trl") is None:
        sys.exit("trl is not installed: pip install trl, in its own environment")
    results = []
    for divergence in BETAS:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            results.append(compare(Path(folder), divergence))
        if not options.json:
            print(results[-1], flush=True)
    worst = max(result["loss_difference"] for result in results)
    if options.json:
        print(json.dumps({"loss_difference": worst, "results": results}))
    whole = all(result["steps"] == NUM_STEPS for result in results)
    sys.exit(worst > TOLERANCE or not whole)


def compare(folder: Path, divergence: Divergence) -> dict[str, Any]:
    """Return how far the losses of both are apart, and how far they moved."""
    write_models(folder)
    theirs = train_theirs(folder, divergence)
    ours = train_ours(folder, divergence, theirs.rows)
    apart = [abs(one - other) for one, other in zip(ours, theirs.losses, strict=True)]
    return {
        "divergence": divergence,
        "steps": len(ours),
        "loss_difference": max(apart),
        "first_loss": theirs.losses[0],
        "last_loss": theirs.losses[-1],
    }


def write_models(folder: Path) -> None:
    """Write a student, and a teacher of another depth whose probabilities are less even."""
    save_tiny(folder / "student", "llama", torch.float32, vocab_size=TOKENS)
    changes = {"num_hidden_layers": 6, "initializer_range": 0.1}
    save_tiny(folder / "teacher", "llama", torch.float32, vocab_size=TOKENS, **changes)
    for name in ("student", "teacher"):
        byte_tokenizer().save_pretrained(folder / name)


@dataclass(slots=True)
class Theirs:
    """The losses of GKDTrainer, and the rows of all steps, in order."""

    losses: list[float] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)


def drawn_rows() -> list[dict[str, Any]]:
    """Return rows of several lengths; the first tokens of each are a prompt."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(NUM_STEPS * NUM_ROWS):
        length, begin = (
            int(torch.randint(*span, (), generator=draw)) for span in ((8, 25), (2, 6))
        )
        ids = torch.randint(3, TOKENS, (length,), generator=draw).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORED] * begin + ids[begin:]})
    return rows


def train_theirs(folder: Path, divergence: Divergence) -> Theirs:
    """Let GKDTrainer take its steps, and note losses and rows."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    disable_progress_bars()
    theirs = Theirs()

    class Recorded(GKDTrainer):  # type: ignore[misc]
        """Notes the loss of each step."""

        def compute_loss(self, *given: Any, **named: Any) -> Any:
            loss = super().compute_loss(*given, **named)
            theirs.losses.append(float(loss.detach()))
            return loss

    def together(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Note the rows, and return them padded on the right."""
        theirs.rows += rows
        width = max(len(row["input_ids"]) for row in rows)
        fills = {"input_ids": 0, "labels": IGNORED}
        found = {
            name: torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in rows])
            for name, fill in fills.items()
        }
        mask = [[1] * len(r["input_ids"]) + [0] * (width - len(r["input_ids"])) for r in rows]
        return found | {"attention_mask": torch.tensor(mask)}

    loaded = AutoModelForCausalLM.from_pretrained
    student, teacher = (loaded(folder / n, dtype=torch.float32) for n in ("student", "teacher"))
    settings = GKDConfig(
        **quiet_arguments(folder / "theirs"),
        beta=BETAS[divergence],
        lmbda=0.0,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=NUM_ROWS,
        max_grad_norm=0.0,
    )
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    trainer = Recorded(
        model=student,
        teacher_model=teacher,
        args=settings,
        data_collator=together,
        train_dataset=Dataset.from_list(drawn_rows()),
        processing_class=byte_tokenizer(),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
    )
    trainer.train()
    return theirs


def train_ours(folder: Path, divergence: Divergence, rows: list[dict[str, Any]]) -> list[float]:
    """Return the loss of each step of a run on the same rows."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[: NUM_STEPS * NUM_ROWS]))
    config = {
        "model": {"name_or_path": str(folder / "student"), "dtype": "fp32"},
        "data": {
            "train": {"path": str(path), "format": "tokens"},
            "max_length": MOST_TOKENS,
            "shuffle": False,
            "packing": False,
        },
        "loss": {
            "name": "distill",
            "teacher": str(folder / "teacher"),
            "divergence": divergence,
            "top_k": TOKENS,
        },
        "train": {"steps": NUM_STEPS, "batch_rows": NUM_ROWS, "max_grad_norm": None},
        "optim": {"learning_rate": RATE, "schedule": "constant", "warmup": 0, "weight_decay": 0},
        "memory": {"device": "cpu"},
        "save": {"dir": str(folder / "run"), "every": None},
    }
    with Trainer(Config.model_validate(config)) as trainer:
        trainer.train()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def host_memory(folder: Path) -> dict[str, Any]:
    """Return the host memory of a run's plan and the most that was resident, without saves."""
    write_model(folder / "student", 0.0)
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 10}
    write_model(folder / "teacher", 0.0, dtype=torch.bfloat16, **sizes)
    row = {"input_ids": list(range(3, 19)), "labels": list(range(3, 19))}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    config: dict[str, Any] = {
        "model": str(folder / "student"),
        "data": {"train": {"path": str(folder / "rows.jsonl"), "format": "tokens"}},
        "loss": {"name": "distill", "teacher": str(folder / "teacher")},
        "train": {"steps": 1, "batch_rows": 4},
        "memory": {"device": "cpu"},
        "save": {"dir": str(folder / "run"), "every": None},
    }
    config["data"] |= {"max_length": 16, "packing": False}
    (folder / "run.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "megatrain", "train", str(folder / "run.yaml")]
    variables = {**os.environ, "MEGATRAIN_CACHE": str(folder / "cache")}
    subprocess.run(command, check=True, stdout=sys.stderr, env=variables)
    plan = json.loads((folder / "run" / "plan.json").read_text())
    host = [line for line in plan["ledger"] if line["place"] == "host"]
    planned = sum(line["num_bytes"] for line in host)
    measured = plan["measured"]["host_peak_bytes"]
    return {
        "planned_bytes": planned,
        "measured_bytes": measured,
        "host_ratio": planned / measured,
        "host_lines": {line["purpose"]: line["num_bytes"] for line in host},
    }


if __name__ == "__main__":
    main()
