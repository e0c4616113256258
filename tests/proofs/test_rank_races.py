"""Ranks on simulated accelerators: the bits of the CPU, no race, and no wait that can be spared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.engine.exchange import EXCHANGE_BYTES
from megatrain.step.ops import OpKind
from proofs.rank_races import TINY, RankRun, faults_of, play, run_of
from testkit import rank_threads
from testkit.cases import at_a_push
from testkit.rank_training import RankCase, differing, joined, ranks_of
from testkit.schedules import lose_waits
from testkit.simulated.accelerator import Simulator
from testkit.virtual_ranks import State

pytestmark = pytest.mark.merge

NUM_RUNS = 60
STUCK_S = 10.0
"""After so long a mutant counts as stuck."""


@pytest.mark.parametrize("number", at_a_push(range(NUM_RUNS), 3))
def test_ranks_have_the_bits_of_the_cpu_and_no_race(number: int) -> None:
    assert faults_of(run_of(number)) == []


RUN = RankRun(
    case=RankCase(
        shapes=((1, 9), (2, 8), (1, 12)), num_steps=2, config=TINY, settings=(("grad_slots", 1),)
    ),
    policies=("late", "late"),
    seed=1,
)
Break = Callable[[pytest.MonkeyPatch], None]


def declares(kind: OpKind, **sides: tuple[str, ...]) -> Break:
    """Leave out families of what the ops of one kind read or write."""
    return lambda patch: lose_waits(patch, kind, **sides)


def on_another_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Simulator, "current_stream", lambda self: self.default)


def at_once(patch: pytest.MonkeyPatch) -> None:
    """As if a collective were done when it is called: nobody waits for the others."""

    def communicate(self: Simulator, reads: Any, writes: Any, work: Callable[[], None]) -> None:
        with self.bypassed:
            work()

    patch.setattr(Simulator, "communicate", communicate)


def shared_buffers(*purposes: str) -> Break:
    """All memory for these purposes is one buffer."""

    def break_it(patch: pytest.MonkeyPatch) -> None:
        real, made = AcceleratorDevice.allocate, dict[AcceleratorDevice, Tensor]()

        def allocate(self: AcceleratorDevice, num_bytes: int, purpose: str) -> Tensor:
            if purpose not in purposes:
                return real(self, num_bytes, purpose)
            if self not in made:
                made[self] = real(self, 1 << 20, purpose)
            return made[self][:num_bytes]

        patch.setattr(AcceleratorDevice, "allocate", allocate)

    return break_it


BREAKS: dict[str, Break] = {
    "GATHER does not wait for FETCH": declares(OpKind.FETCH, writes=("slot",)),
    "GATHER waits for nothing, and nothing for it": declares(
        OpKind.GATHER, reads=("slot",), writes=("slot",)
    ),
    "compute does not wait for GATHER": declares(OpKind.GATHER, writes=("slot",)),
    "EXCHANGE does not wait for BACKWARD": declares(OpKind.BACKWARD, writes=("grad_slot",)),
    "EXCHANGE waits for nothing, and nothing for it": declares(
        OpKind.EXCHANGE, reads=("grad_slot",), writes=("grad_slot",)
    ),
    "DRAIN does not wait for EXCHANGE": declares(OpKind.EXCHANGE, writes=("grad_slot",)),
    "DRAIN waits for nothing": declares(OpKind.DRAIN, reads=("grad_slot",)),
    "collectives are on another stream": on_another_stream,
    "collectives are not queued": at_once,
    "exchange and outbox share their buffer": shared_buffers("exchange", "outbox"),
}


@pytest.fixture(scope="module")
def expected() -> State:
    """What ranks on the CPU find, before anything is broken."""
    return joined(ranks_of(RUN.case))


def faults_within(run: RankRun, expected: State) -> list[str]:
    try:
        found, simulators = play(run, STUCK_S)
    except Exception as error:
        return [repr(error)]
    faults = differing(joined(found), expected)
    return faults + [race for simulator in simulators for race in simulator.races]


@pytest.mark.parametrize("broken", at_a_push(list(BREAKS), 3))
def test_a_missing_wait_is_found(
    broken: str, monkeypatch: pytest.MonkeyPatch, expected: State
) -> None:
    monkeypatch.setattr(rank_threads, "DEADLINE_S", STUCK_S)
    BREAKS[broken](monkeypatch)
    assert faults_within(RUN, expected) != []


def test_the_exchange_takes_two_buffers_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their size is that of the largest gradient, or of EXCHANGE_BYTES."""
    taken: list[int] = []
    real = AcceleratorDevice.allocate

    def allocate(self: AcceleratorDevice, num_bytes: int, purpose: str) -> Tensor:
        if purpose == "exchange":
            taken.append(num_bytes)
        return real(self, num_bytes, purpose)

    monkeypatch.setattr(AcceleratorDevice, "allocate", allocate)
    play(replace(RUN, exchange_bytes=4096, case=replace(RUN.case, num_steps=1)))
    assert taken == [4096] * 4
    taken.clear()
    play(replace(RUN, exchange_bytes=EXCHANGE_BYTES, case=replace(RUN.case, num_steps=1)))
    model = RUN.case.model()
    table = model.get_input_embeddings().weight
    assert taken
    assert all(table.nbytes <= size <= table.nbytes + 4096 for size in taken)
    assert model.dtype is torch.bfloat16
