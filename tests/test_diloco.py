"""The exchange of examples/diloco.py, with a manager that stands for torchft's."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from torch import Tensor

import megatrain as mt
from megatrain.run.checkpoints import Checkpoints
from testkit.families import save_tiny

EXAMPLE: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[1] / "examples/diloco.py"))
read_masters, write_masters = EXAMPLE["read_masters"], EXAMPLE["write_masters"]


class Manager:
    """One other host: its difference in every tensor, and how its exchanges end."""

    def __init__(self, difference: float, *, commits: list[bool]) -> None:
        self.difference = difference
        self.commits = commits
        self.at_quorum: Callable[[], None] = lambda: None

    def start_quorum(self) -> None:
        self.at_quorum()

    def allreduce(self, tensor: Tensor, *, reduce_op: object) -> Any:
        is_count = tensor.numel() == 1
        tensor += 1.0 if is_count else self.difference
        return SimpleNamespace(wait=lambda: None)

    def should_commit(self) -> bool:
        return self.commits.pop(0)


@pytest.fixture(params=["bf16", "fp32"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> mt.HostModel:
    save_tiny(tmp_path, "llama")
    return mt.load_model(tmp_path, dtype=request.param)


def trainer_of(home: mt.HostModel) -> Any:
    engine = create_autospec(mt.Engine, instance=True)
    return SimpleNamespace(
        home=home, engine=engine, checkpoints=create_autospec(Checkpoints, instance=True)
    )


def joined(home: mt.HostModel, manager: Manager) -> Any:
    """Return the callback of a host whose anchor is the masters as they are now."""
    diloco = EXAMPLE["DiLoCo"](lambda _: manager, learning_rate=0.5, momentum=0.5)
    diloco.exchange = lambda trainer: 1
    diloco.on_train_begin(None, None, None, trainer=trainer_of(home))
    del diloco.exchange
    return diloco


def moved(masters: list[Tensor], step: float) -> list[Tensor]:
    return [master - step for master in masters]


def test_masters_that_were_written_are_read_in_the_same_bits(home: mt.HostModel) -> None:
    masters = [master * (1 + 1e-5) for master in read_masters(home.store)]
    write_masters(home.store, masters)
    assert all(map(torch.equal, read_masters(home.store), masters))


def test_an_exchange_is_a_nesterov_step_on_the_mean_difference(home: mt.HostModel) -> None:
    begin = read_masters(home.store)
    diloco = joined(home, Manager(0.25, commits=[True, True]))
    write_masters(home.store, moved(begin, 0.75))
    assert diloco.exchange(trainer_of(home)) == 2
    # Mean difference 0.5, so the momentum is 0.5 and the step 0.5 * (0.5 + 0.5 * 0.5).
    torch.testing.assert_close(read_masters(home.store), moved(begin, 0.375))
    assert all(map(torch.equal, read_masters(home.store), diloco.anchor))
    diloco.exchange(trainer_of(home))
    # Mean difference 0.125, momentum 0.375.
    step = 0.5 * (0.125 + 0.5 * 0.375)
    torch.testing.assert_close(read_masters(home.store), moved(begin, 0.375 + step))


def test_a_host_that_is_behind_takes_the_anchor_and_adds_nothing(home: mt.HostModel) -> None:
    begin = read_masters(home.store)
    manager = Manager(0.25, commits=[False, True])
    diloco = joined(home, manager)
    ahead = joined(home, Manager(0.0, commits=[]))
    ahead.anchor = moved(begin, 1.0)
    states = [ahead.state_dict()]
    manager.at_quorum = lambda: diloco.load_state_dict(states.pop()) if states else None
    write_masters(home.store, moved(begin, 0.75))
    assert diloco.exchange(trainer_of(home)) == 1, "also in the second try"
    torch.testing.assert_close(read_masters(home.store), moved(begin, 1.0 + 0.5 * 1.5 * 0.25))
    assert not diloco.is_behind
