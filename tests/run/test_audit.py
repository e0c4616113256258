"""An audit finds rounds that were not trained as they are claimed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli.auditing import read_span
from megatrain.config import Config
from megatrain.errors import ConfigError
from megatrain.optim.kernel import AdamWScalars
from megatrain.run.audit import Verdict, audit
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of

pytestmark = [pytest.mark.usefixtures("cache_in_world"), pytest.mark.merge]
SETTING = Setting(save_every=None, eval_every=None)


def _config(world: Path, folder: Path, **changes: Any) -> Config:
    peers = {
        "at": f"file://{folder}/meeting", "name": "a", "signed": False, "inner_steps": 3,
        "compression": "sparse", "density": 0.25, **changes,
    }  # fmt: skip
    eval_ = {"samples": 0}
    return config_of(world, folder / "run", SETTING, peers=peers, eval=eval_, log={"every": 100})


def _verdicts(folder: Path, numbers: range) -> list[Verdict]:
    return audit(folder / "run", numbers, folder / "scratch", print)


def _trained(world: Path, folder: Path, spoil: Callable[[Trainer], None]) -> None:
    with Trainer(_config(world, folder)) as trainer:
        spoil(trainer)
        trainer.train()


def test_honest_rounds_are_true(world: Path, tmp_path: Path) -> None:
    _trained(world, tmp_path, lambda trainer: None)
    before = sorted(path for path in (tmp_path / "meeting").rglob("*"))
    assert [one.reason for one in _verdicts(tmp_path, range(1, 4))] == [None] * 3
    assert sorted(path for path in (tmp_path / "meeting").rglob("*")) == before


def _skip_a_step(trainer: Trainer) -> None:
    real, results = trainer.engine.step, list[Any]()

    def step(batch: Any, *rest: Any) -> Any:
        if len(results) == 4:
            trainer.engine.leave_out()
            results.append(results[-1])
        else:
            results.append(real(batch, *rest))
        return results[-1]

    trainer.engine.step = step  # type: ignore[method-assign, assignment]


def _other_rows(trainer: Trainer) -> None:
    real, batches = trainer.data.next_batch, list[Any]()

    def next_batch() -> Any:
        batches.append(real())
        return batches[0] if len(batches) == 5 else batches[-1]

    trainer.data.next_batch = next_batch  # type: ignore[method-assign]


def _stale_weights(trainer: Trainer) -> None:
    assert trainer._rounds is not None
    rounds, first = trainer._rounds, {}  # type: ignore[var-annotated]
    masters, real = rounds._masters, rounds._take_anchor

    def take(pieces: Any, **words: Any) -> None:
        real(pieces, **words)
        for piece in pieces:
            masters.write(piece, first.setdefault(piece.number, masters.read(piece)))

    rounds._take_anchor = take  # type: ignore[method-assign]


@pytest.mark.parametrize("spoil", [_skip_a_step, _other_rows, _stale_weights])
def test_frauds_are_found(world: Path, tmp_path: Path, spoil: Callable[[Trainer], None]) -> None:
    _trained(world, tmp_path, spoil)
    *honest, false = _verdicts(tmp_path, range(1, 4))
    assert honest
    assert all(one.reason is None for one in honest)
    assert false.reason == "its weights are not those that these steps lead to"


def test_another_rate_is_found(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        real = AdamWScalars.at

        def at(*args: Any, **words: Any) -> Any:
            words["lr"] *= 1.01
            return real(*args, **words)

        patch.setattr(AdamWScalars, "at", staticmethod(at))
        _trained(world, tmp_path, lambda trainer: None)
    assert _verdicts(tmp_path, range(1, 2))[0].reason is not None


def test_spans_of_exchanges() -> None:
    assert (read_span("3..5"), read_span("7")) == (range(3, 6), range(7, 8))
    with pytest.raises(ConfigError, match="give exchanges from 1 on"):
        read_span("5..3")
