"""While a model only generates, layers that fit stay on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.device import CpuDevice
from megatrain.engine.compute.drawing import GREEDY
from megatrain.engine.engine import Engine
from megatrain.engine.sampling import continue_texts
from megatrain.errors import ConfigError
from megatrain.lanes.player import Player
from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Param
from megatrain.optim.adamw import AdamW
from megatrain.optim.states import WITH_CLIP
from testkit.engines import make_engine
from testkit.rank_threads import ONE_AT_A_TIME, Together, in_turn
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched
from testkit.spoken import predicting, spoken_model

NUM_TOKENS = 10
PROMPTS = [[5 + n, 6, *[7] * (n % 4)] for n in range(8)]


class Counting(AcceleratorDevice):
    """Counts the bytes that are copied to the device in large pieces: weights."""

    num_bytes = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        if target.nbytes >= 4096:
            self.num_bytes += target.nbytes
        super().copy(target, source)


def plain() -> Any:
    return spoken_model("llama", seed=3, eos_token_id=None)


def num_bytes(params: Sequence[Param]) -> int:
    return sum(4 * math.prod(param.shape) for param in params)


def drawn() -> tuple[list[list[int]], Counting, Any]:
    decoder, store = predicting(plain())
    simulator = Simulator(policy="random")
    device = Counting(simulator)
    with watched(simulator), make_engine(decoder, store, device=device) as engine:
        device.num_bytes = 0
        found = continue_texts(engine, PROMPTS, NUM_TOKENS, frozenset())
    assert simulator.races == []
    assert simulator.failures == []
    return found, device, decoder


def test_with_room_for_all_every_weight_crosses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, device, decoder = drawn()
    weights = num_bytes(decoder.params)
    assert 0.9 * weights < device.num_bytes < 1.1 * weights
    monkeypatch.setattr(Simulator, "free_bytes", lambda self: 0)
    streamed, device, _ = drawn()
    assert streamed == found
    layers = weights - num_bytes(decoder.blocks[0].params)
    assert 0.8 * NUM_TOKENS * layers < device.num_bytes < 1.1 * NUM_TOKENS * weights


def test_no_step_is_taken_while_layers_stay_and_the_next_one_reads_new_weights() -> None:
    model = plain()
    decoder = build_decoder(model.config, "fp32")
    store = Store(build_layout(decoder.blocks, WITH_CLIP))
    for param in decoder.params:
        store.param(param.name, TensorKind.HI).copy_(model.get_parameter(param.name).detach())
    ids = torch.arange(5, 25)[None]
    batch = [MicroBatch(input_ids=ids, labels=ids)]
    optimizer = AdamW(learning_rate=1e-2)
    simulator = Simulator(policy="early")
    parts: dict[str, Any] = {"optimizer": optimizer, "device": AcceleratorDevice(simulator)}
    with watched(simulator), Engine(decoder, store, **parts) as engine:
        slots = engine._machine.gradients._sums._slots
        with engine.staying(100, 50):
            assert not slots.buffers, "gradient slots make room"
            first = engine.sample_next(batch, GREEDY)
            with pytest.raises(ConfigError, match="layers stay on the device"):
                engine.step(batch)
        before = engine.next_token_logits(batch)
        engine.step(batch)
        assert slots.buffers
        after = engine.next_token_logits(batch)
        with engine.staying(100, 50):
            staying = engine.next_token_logits(batch)
    assert int(first[0][0]) == int(before[0].argmax())
    assert not torch.equal(before[0], after[0])
    assert torch.equal(staying[0], after[0])


def trained(*, stays: bool, gathers: bool) -> dict[str, Tensor]:
    """Return the weights after three steps, perhaps with answers drawn between them."""
    model = plain()
    decoder = build_decoder(model.config, "fp32")
    store = Store(build_layout(decoder.blocks, WITH_CLIP))
    for param in decoder.params:
        store.param(param.name, TensorKind.HI).copy_(model.get_parameter(param.name).detach())
    ids = torch.arange(5, 25).view(2, 10)
    batch = [MicroBatch(input_ids=ids, labels=ids), MicroBatch(input_ids=ids + 1, labels=ids)]
    simulator = Simulator(policy="random")
    parts: dict[str, Any] = {
        "optimizer": AdamW(learning_rate=1e-2),
        "device": AcceleratorDevice(simulator),
        "gather_embedding": gathers,
    }
    with watched(simulator), make_engine(decoder, store, **parts) as engine:
        for _ in range(3):
            engine.step(batch)
            if stays:
                continue_texts(engine, PROMPTS[:2], 3, frozenset())
        engine.synchronize()
    assert simulator.races == []
    assert simulator.failures == []
    return {param.name: store.param(param.name, TensorKind.HI).clone() for param in decoder.params}


@pytest.mark.merge
@pytest.mark.parametrize("gathers", [False, True])
def test_steps_around_it_have_the_bits_of_steps_without(gathers: bool) -> None:
    """Gradient slots are given up and made again, those of gathered rows too."""
    expected, found = trained(stays=False, gathers=gathers), trained(stays=True, gathers=gathers)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


class Noting(Engine):
    """Notes how many texts each pass of this rank reads."""

    def sample_next(self, batch: Sequence[MicroBatch], *rest: Any) -> list[tuple[Tensor, Tensor]]:
        self.num_rows = [*getattr(self, "num_rows", []), sum(len(m.input_ids) for m in batch)]
        return super().sample_next(batch, *rest)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_texts(size: int) -> None:
    """Five texts: one rank has more of them than another, and one ends before the others."""
    model, prompts = plain(), PROMPTS[:5]
    with Engine(*predicting(model)) as engine:
        alone = continue_texts(engine, prompts, 6, frozenset())
        ends = frozenset({alone[4][1]})
        alone = continue_texts(engine, prompts, 6, ends)

    def of_rank(ranks: Any) -> tuple[list[list[int]], list[int]]:
        with ONE_AT_A_TIME:
            decoder = build_decoder(model.config, "fp32")
            store = Store(build_layout(decoder.blocks, (TensorKind.HI,), ranks.owner))
            for param in decoder.params:
                owned = store.layout.places[param.name].owned
                values = model.get_parameter(param.name).detach().reshape(-1)
                store.param(param.name, TensorKind.HI).view(-1).copy_(
                    values[owned.start : owned.stop]
                )
            player = Player(in_turn(), deadline_s=120.0)
            device = CpuDevice(copying=True)
            engine = Noting(decoder, store, device=device, ranks=ranks, player=player)
        with engine:
            return continue_texts(engine, prompts, 6, ends), engine.num_rows

    found = Together(size).run(of_rank)
    assert [texts for texts, _ in found] == [alone] * size
    assert [rows[0] for _, rows in found] == [len(prompts[rank::size]) for rank in range(size)]
    assert len({len(rows) for _, rows in found}) == 1
