"""An audit finds rounds that were not trained as they are claimed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from megatrain.cli.auditing import read_span
from megatrain.config import Config
from megatrain.errors import ConfigError, PeersError
from megatrain.run.audit import Verdict, _replay_config, audit
from megatrain.run.trainer import Trainer
from megatrain.run.with_peers import RECIPE
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"steps": [3, 999]}, "it ends at step 999, and the run of its recipe at 9"),
        ({"steps": [3, 3]}, "it ends at step 3, and the run of its recipe at 9"),
        ({"steps": None}, "it does not say which steps it took"),
        ({"steps": ["3", "6"]}, "it does not say which steps it took"),
        ({"data": None}, "it was at None of its rows"),
        ({"weights": None}, "its weights are not those that these steps lead to"),
        ({}, None),
    ],
)
def test_a_claim_that_cannot_be_repeated_is_false_and_that_of_another_is_none(
    world: Path, tmp_path: Path, change: dict[str, object], reason: str | None
) -> None:
    _trained(world, tmp_path, lambda trainer: nullcontext())
    path = tmp_path / "meeting" / "exchanges" / "00000002.json"
    fields = json.loads(path.read_bytes())
    fields["entered"][0] |= change
    if reason is None:  # a closer that wants to blame the peer
        fields["entered"] = [{"peer": "a", "number": 2, "steps": [3, 6]}]
    path.write_text(json.dumps(fields))
    first, second = _verdicts(tmp_path, range(1, 3))
    assert (first.reason, second.is_claimed) == (None, reason is not None)
    assert (second.reason or "").startswith(reason or "")
    assert bool(second.reason) is bool(reason)


def _declared(world: Path, folder: Path, **changes: object) -> Config:
    """Return the config of a peer that has declared more than a recipe."""
    config = peer_config(world, folder)
    values = config.model_dump(mode="json")
    recipe = {section: values[section] for section in RECIPE}
    entry = folder / "meeting" / "members" / f"{config.peers.name}.json"
    entry.parent.mkdir(parents=True, exist_ok=True)
    entry.write_text(json.dumps({"recipe": {**recipe, **changes}}))
    return config


def test_nothing_of_a_stranger_is_run_or_written_where_it_says(world: Path, tmp_path: Path) -> None:
    evil = {
        "rewards": {"functions": [{"function": "evil.py:f"}]},
        "rollouts": {"environment": "evil.py:f"},
        "save": {"dir": "/evil"},
    }
    config = _declared(world, tmp_path, **evil)
    memory = config.memory.model_copy(update={"disk": "/evil"})
    config = config.model_copy(update={"memory": memory})
    found = _replay_config(config, tmp_path / "run", tmp_path / "scratch")
    assert "evil" not in found.model_dump_json()
    assert found.memory.disk == str(tmp_path / "scratch" / "disk")
    loss = {**config.loss.model_dump(mode="json"), "name": "grpo"}
    with pytest.raises(ConfigError, match="nothing rewards the answers"):
        _replay_config(_declared(world, tmp_path, loss=loss), tmp_path / "run", tmp_path)
    (tmp_path / "meeting" / "members" / f"{config.peers.name}.json").write_bytes(b"[1]")
    with pytest.raises(PeersError, match="has declared no recipe"):
        _replay_config(config, tmp_path / "run", tmp_path)


def test_spans_of_exchanges() -> None:
    assert (read_span("3..5"), read_span("7")) == (range(3, 6), range(7, 8))
    with pytest.raises(ConfigError, match="give exchanges from 1 on"):
        read_span("5..3")
