"""Frauds of a peer: it claims rounds that it has not trained as it says.

    with fraud(trainer, step):
        trainer.train()

Each is planted at one step of a run; those of `stale_weights` at the end of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.optim.kernel import AdamWScalars
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of

INNER_STEPS = 3
_SETTING = Setting(save_every=None, eval_every=None)
Fraud = Callable[[Trainer, int], AbstractContextManager[None]]


def peer_config(world: Path, folder: Path) -> Config:
    """Return the config of a peer alone, in rounds of INNER_STEPS, whose run is in the folder."""
    peers = {
        "at": f"file://{folder}/meeting", "name": "a", "signed": False,
        "inner_steps": INNER_STEPS, "compression": "sparse", "density": 0.25,
    }  # fmt: skip
    quiet = {"eval": {"samples": 0}, "log": {"every": 100}}
    return config_of(world, folder / "run", _SETTING, peers=peers, **quiet)


@contextmanager
def skipped_step(trainer: Trainer, at: int) -> Iterator[None]:
    """Leave a step out."""
    real, results = trainer.engine.step, list[Any]()

    def step(batch: Any, *rest: Any) -> Any:
        if len(results) == at - 1 and results:
            trainer.engine.leave_out()
            results.append(results[-1])
        else:
            results.append(real(batch, *rest))
        return results[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.engine, "step", step)
        yield


@contextmanager
def other_rows(trainer: Trainer, at: int) -> Iterator[None]:
    """Train a step on the rows of the first one."""
    real, batches = trainer.data.next_batch, list[Any]()

    def next_batch() -> Any:
        batches.append(real())
        return batches[0] if len(batches) == at else batches[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.data, "next_batch", next_batch)
        yield


@contextmanager
def another_rate(trainer: Trainer, at: int) -> Iterator[None]:
    """Take a step at a rate that is higher by 1 %."""
    real = AdamWScalars.at

    def scalars(step: int, **words: Any) -> Any:
        return real(step, **words | ({"lr": 1.01 * words["lr"]} if step == at else {}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdamWScalars, "at", staticmethod(scalars))
        yield


@contextmanager
def stale_weights(trainer: Trainer, at: int) -> Iterator[None]:
    """Begin the round that has the step from the weights of the first anchor."""
    rounds = trainer._rounds
    assert rounds is not None
    masters, real = rounds._masters, rounds._take_anchor
    first = {piece.number: masters.read(piece) for piece in rounds.pieces}

    def take(pieces: Any, **words: Any) -> None:
        real(pieces, **words)
        if trainer.state.step < at <= trainer.state.step + rounds.every:
            for piece in pieces:
                masters.write(piece, first[piece.number])
            rounds.changed()  # nothing else may look wrong

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "_take_anchor", take)
        yield


FRAUDS: Mapping[str, Fraud] = {
    "skipped step": skipped_step,
    "other rows": other_rows,
    "another rate": another_rate,
    "stale weights": stale_weights,
}
