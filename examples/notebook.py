"""A notebook as a script: rows in memory, callbacks, own loss and metrics, Ctrl-C, a resume.

Cells are separated by `# %%`: editors run them one by one, and `jupytext --to ipynb` makes a
notebook of them. It has no function main and no guard, as a notebook has none. It makes its own
tiny random model, so that it runs anywhere, without a network or a GPU.

Card: the rows are all 100 sums of two digits, made here; 7 steps show the calls and teach nothing,
and the model is deleted at the end. examples/addition trains one that can add.
"""

# %% A tiny model, and rows as a dataset
import signal
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch

import megatrain as mt
from megatrain.cli.demo import write_demo

scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)
write_demo(folder / "demo")
rows = datasets.Dataset.from_list(
    [
        {"prompt": f"{first} + {second}", "completion": str(first + second)}
        for first in range(10)
        for second in range(10)
    ]
)


# %% Callbacks, a loss and metrics
class Watch(mt.Callback):
    """Asks for an evaluation after step 2, and presses Ctrl-C in step 4."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(
        self, config: mt.Config, state: mt.RunProgress, control: mt.Control, **_: Any
    ) -> None:
        assert state.loss is not None
        self.losses.append(state.loss)
        control.should_evaluate = state.global_step == 2

    def on_step_begin(
        self, config: mt.Config, state: mt.RunProgress, control: mt.Control, **_: Any
    ) -> None:
        if state.global_step == 3 and len(self.losses) == 3:
            signal.raise_signal(signal.SIGINT)


class Clipped(mt.Loss):
    """Like fine-tuning, but a token that is already likely no longer counts."""

    def count(self, inputs: mt.LossInputs) -> int:
        return int((inputs.targets != -100).sum())

    def value(self, inputs: mt.LossInputs, logprobs: torch.Tensor) -> mt.LossValue:
        return mt.LossValue(total=-logprobs.clamp(max=-0.05).sum())


def compute_metrics(tokens: mt.EvalTokens) -> dict[str, float]:
    return {"accuracy": float((tokens.predictions == tokens.targets).mean())}


# %% Train, interrupt, go on
watch = Watch()
arguments: dict[str, Any] = {
    "model": str(folder / "demo" / "model"),
    "train_dataset": rows,
    "data": {"eval": 0.1, "max_length": 64},
    "train": {"steps": 5, "batch_tokens": 512},
    "optim": {"learning_rate": 1e-3},
    "memory": {"device": "cpu"},
    "eval": {"samples": 0},
    "save": {"dir": str(folder / "run")},
    "loss": Clipped(),
    "compute_metrics": compute_metrics,
}
trainer = mt.Trainer(**arguments, callbacks=[watch])
try:
    trainer.train()
except KeyboardInterrupt as stop:
    print(stop)
outcome = trainer.train()
print(f"{outcome.num_steps} steps, loss {outcome.first_loss:.3f} to {outcome.last_loss:.3f}")
trainer.close()
assert watch.losses[-1] == outcome.last_loss
assert watch.losses[-1] < watch.losses[0]

# %% Another two steps on the same rows, from the checkpoint; then a model for others
with mt.Trainer(**arguments | {"train": {"steps": 7, "batch_tokens": 512}}, resume=True) as trainer:
    print(f"{trainer.state.step} of {trainer.num_steps} steps are done")
    trainer.train()
    trainer.export(folder / "trained")
print(sorted(path.name for path in (folder / "trained").iterdir()))
scratch.cleanup()
