"""An audit finds rounds that were not trained as they are claimed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from megatrain.cli.auditing import read_span
from megatrain.errors import ConfigError
from megatrain.run.audit import Verdict, audit
from megatrain.run.trainer import Trainer
from testkit.frauds import FRAUDS, Fraud, peer_config

pytestmark = [pytest.mark.usefixtures("cache_in_world"), pytest.mark.merge]


def _verdicts(folder: Path, numbers: range) -> list[Verdict]:
    return audit(folder / "run", numbers, folder / "scratch", print)


def _trained(
    world: Path, folder: Path, spoil: Callable[[Trainer], AbstractContextManager[None]]
) -> None:
    with Trainer(peer_config(world, folder)) as trainer, spoil(trainer):
        trainer.train()


def test_honest_rounds_are_true(world: Path, tmp_path: Path) -> None:
    _trained(world, tmp_path, lambda trainer: nullcontext())
    before = sorted(path for path in (tmp_path / "meeting").rglob("*"))
    assert [one.reason for one in _verdicts(tmp_path, range(1, 4))] == [None] * 3
    assert sorted(path for path in (tmp_path / "meeting").rglob("*")) == before


@pytest.mark.parametrize("fraud", FRAUDS.values(), ids=FRAUDS)
def test_frauds_are_found(world: Path, tmp_path: Path, fraud: Fraud) -> None:
    _trained(world, tmp_path, lambda trainer: fraud(trainer, 5))
    *honest, false = _verdicts(tmp_path, range(1, 4))
    assert [one.reason for one in honest] == [None]
    assert false.reason == "its weights are not those that these steps lead to"


def test_spans_of_exchanges() -> None:
    assert (read_span("3..5"), read_span("7")) == (range(3, 6), range(7, 8))
    with pytest.raises(ConfigError, match="give exchanges from 1 on"):
        read_span("5..3")
