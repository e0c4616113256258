"""A complete run from Python: rows in a file, a config, training with a resume, an export.

Makes its own tiny random model and rows, so that it runs anywhere, without a network or a GPU.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import megatrain as mt
from megatrain.cli.demo import write_demo


def main() -> None:
    """Train 6 steps, then 2 more from the checkpoint, and export."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_demo(folder / "demo")  # a tiny model and tokenizer
        rows = [
            {"prompt": f"{first} + {second}", "completion": str(first + second)}
            for first in range(10)
            for second in range(10)
        ]
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

        config = mt.Config(
            model=str(folder / "demo" / "model"),
            data={"train": str(file), "eval": 0.1, "max_length": 64},
            train={"steps": 6, "batch_tokens": 512},
            optim={"learning_rate": 1e-3},
            memory={"device": "cpu"},
            save={"dir": str(folder / "run")},
        )
        with mt.Trainer(config) as trainer:
            outcome = trainer.train()
        print(f"loss {outcome.first_loss:.3f} to {outcome.last_loss:.3f}")

        longer = mt.load_config(folder / "run" / "config.yaml", ["train.steps=8"])
        with mt.Trainer(longer) as trainer:
            print(f"{trainer.state.global_step} of {trainer.num_steps} steps are done")
            trainer.train(resume_from_checkpoint=True)
            print(f"held out: {trainer.evaluate()['eval_loss']:.3f}")
            trainer.save_model(folder / "trained")


if __name__ == "__main__":  # preparing rows starts processes, which import this file
    main()
