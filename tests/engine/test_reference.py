"""A reference: other weights of the same model, read through the slots of the engine that trains.

Its log-probabilities stay those of the weights that training began with, bit for bit, and training
has the bits that it would have had without.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain import AdamW, CpuDevice, HostModel, Muon, load_model
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.device import Device
from megatrain.engine.engine import Engine
from megatrain.engine.weights import Weights
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind, store_kinds
from megatrain.memory.store import clone_weights
from megatrain.optim.states import STATES
from megatrain.ranks.ranks import Ranks
from megatrain.step.settings import StepSettings
from testkit.families import save_tiny
from testkit.plain import make_batch
from testkit.rank_threads import ONE_AT_A_TIME, Together
from testkit.rank_training import RankCase, engine_of
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched

BATCHES = [make_batch([(2, 12), (1, 9)], seed=number) for number in range(3)]
ASKED = make_batch([(2, 11), (1, 16)], seed=9)
CASES: dict[str, tuple[str, Callable[[], Device], dict[str, Any]]] = {
    "in place": ("llama", CpuDevice, {}),
    "slots": ("llama", lambda: CpuDevice(copying=True), {"slots": 2}),
    "rows": (
        "llama",
        lambda: AcceleratorDevice(Simulator(policy="random")),
        {"gather_embedding": True},
    ),
    "pages": ("mixtral", lambda: AcceleratorDevice(Simulator(policy="late")), {"expert_pages": 2}),
}

MORE = [("rows", "adamw"), ("pages", "adamw"), ("slots", "muon")]


def loaded(folder: Path, optimizer: str) -> HostModel:
    kinds = store_kinds(STATES[optimizer]["fp32"], waits=True)
    return load_model(folder, dtype="fp32", kinds=kinds)


def trained(
    folder: Path, case: str, optimizer: str, *, asks: bool
) -> tuple[list[list[Tensor]], list[Tensor], Tensor]:
    """Return what the reference says after each step, what the model says, and its weights."""
    home, (_, make_device, settings) = loaded(folder, optimizer), CASES[case]
    device = make_device()
    runtime = device._runtime if isinstance(device, AcceleratorDevice) else None
    found: list[list[Tensor]] = []
    made = {"adamw": AdamW, "muon": Muon}[optimizer]
    with (
        watched(runtime) if isinstance(runtime, Simulator) else nullcontext(),
        Engine(
            home.decoder,
            home.store,
            optimizer=made(learning_rate=1e-2, max_grad_norm=1.0),
            settings=StepSettings(**settings),
            device=device,
            reference=clone_weights(home.store) if asks else None,
        ) as engine,
    ):
        for batch in BATCHES:
            engine.step(batch)
            if asks:
                found.append(engine.logprobs(ASKED, reference=True))
        own = engine.logprobs(ASKED)
    if isinstance(runtime, Simulator):
        assert (runtime.races, runtime.failures) == ([], [])
    return found, own, home.store.arena(TensorKind.HI).clone()


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        ("in place", "adamw"),
        ("slots", "adamw"),
        *(pytest.param(*one, marks=pytest.mark.merge) for one in MORE),
    ],
)
def test_it_stays_the_model_as_it_began_and_training_goes_on(
    tmp_path: Path, case: str, optimizer: str
) -> None:
    folder = save_tiny(tmp_path, CASES[case][0], torch.float32)
    home = loaded(folder, optimizer)
    with Engine(home.decoder, home.store) as engine:
        began = engine.logprobs(ASKED)
    found, own, weights = trained(folder, case, optimizer, asks=True)
    for asked in found:
        assert all(map(torch.equal, asked, began))
    assert not any(map(torch.equal, own, began)), "the model has moved"
    _, expected, plain = trained(folder, case, optimizer, asks=False)
    assert all(map(torch.equal, own, expected))
    assert torch.equal(weights, plain)


def test_one_that_stayed_in_place_of_the_weights_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(tmp_path, "llama", torch.float32)
    read = Weights._read
    monkeypatch.setattr(Weights, "_read", lambda self, _: read(self, self._reference))
    _, own, _ = trained(folder, "slots", "adamw", asks=True)
    _, expected, _ = trained(folder, "slots", "adamw", asks=False)
    assert not any(map(torch.equal, own, expected))


def test_ranks_share_it_as_they_share_the_model() -> None:
    case = RankCase(size=2, dtype="fp32")
    model = case.model()

    def asked(ranks: Ranks) -> tuple[list[Tensor], list[Tensor]]:
        engine, store = engine_of(case, ranks, model)
        with ONE_AT_A_TIME:
            reference = clone_weights(store)
        weights = engine._machine.weights
        weights._reference = reference
        with engine:
            began = engine.logprobs(ASKED)
            engine.step(case.batches[0])
            return began, engine.logprobs(ASKED, reference=True)

    for began, after in Together(case.size).run(asked):
        assert all(map(torch.equal, began, after))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", torch.float32)
    home = loaded(folder, "adamw")
    with (
        Engine(home.decoder, home.store) as engine,
        pytest.raises(ConfigError, match="the engine has no reference: give it one"),
    ):
        engine.logprobs(ASKED, reference=True)
    other = loaded(folder, "muon").store
    with pytest.raises(ConfigError, match="the reference has other params than the model"):
        Engine(home.decoder, home.store, reference=clone_weights(other))
    device = CpuDevice(copying=True)
    reference = clone_weights(home.store)
    with (
        Engine(home.decoder, home.store, device=device, reference=reference) as engine,
        engine.staying(100, 50),
        pytest.raises(ConfigError, match=r"leave `engine.staying` first"),
    ):
        engine.logprobs(ASKED, reference=True)
