"""A tiny model that several ranks train, each with its own store, device and engine.

ranks_of(case)      what each rank found, ranks as threads
virtual_of(case)    the same model for testkit/virtual_ranks.py
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from megatrain.batch import MicroBatch
from megatrain.devices.device import CpuDevice, Device
from megatrain.engine.engine import Engine
from megatrain.engine.results import StepResult
from megatrain.engine.updates import Optimizer
from megatrain.lanes.player import Player
from megatrain.memory.kinds import TensorKind, store_kinds
from megatrain.memory.layout import build_layout
from megatrain.memory.store import Store
from megatrain.models.adapters.lora import LoraConfig, adapt_layers, is_adapter
from megatrain.models.build import build_decoder
from megatrain.models.decoder import COMPUTE_DTYPES, Decoder
from megatrain.optim.adamw import AdamW
from megatrain.optim.muon import Muon
from megatrain.optim.torch_kernel import TorchKernel
from megatrain.ranks.ranks import Ranks
from megatrain.step.settings import StepSettings
from testkit.families import tiny_config, tiny_model
from testkit.plain import make_batch, seed_like_engine
from testkit.plain_lora import drawn_like
from testkit.rank_threads import ONE_AT_A_TIME, Together, in_turn
from testkit.virtual_ranks import State, VirtualRanks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCase:
    """What is trained, by how many ranks, and how."""

    family: str = "llama"
    size: int = 2
    shapes: tuple[tuple[int, int], ...] = ((2, 24), (1, 17), (3, 9))
    """Rows and length of the micro-batches of a step."""
    form: Literal["plain", "padded", "packed"] = "plain"
    update: Literal["late", "in_backward", "second_backward"] = "late"
    state: Literal["fp32", "bf16", "8bit"] = "fp32"
    optimizer_name: Literal["adamw", "muon"] = "adamw"
    dtype: Literal["bf16", "fp32"] = "bf16"
    max_grad_norm: float = 1.0
    """Unless updates run in backward."""
    num_steps: int = 3
    evaluates: bool = False
    """After each step but the last."""
    frozen: tuple[str, ...] = ()
    lora: LoraConfig | None = None
    config: tuple[tuple[str, Any], ...] = ()
    """Changes to the family's configuration."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Further fields of StepSettings."""

    @property
    def batches(self) -> list[list[MicroBatch]]:
        """One per step; the micro-batches change their order."""
        turned = [(*self.shapes[n:], *self.shapes[:n]) for n in range(self.num_steps)]
        marks = {} if self.form == "plain" else {self.form: True}
        return [make_batch(shapes, seed=n, **marks) for n, shapes in enumerate(turned)]

    def optimizer(self, **changes: Any) -> AdamW:
        clips = {} if self.update == "in_backward" else {"max_grad_norm": self.max_grad_norm}
        kind = Muon if self.optimizer_name == "muon" else AdamW
        return kind(learning_rate=1e-2, weight_decay=0.1, state=self.state, **(clips | changes))

    def model(self) -> PreTrainedModel:
        """Return the model, the same each time. One thread at a time."""
        model = tiny_model(self.family, COMPUTE_DTYPES[self.dtype], **dict(self.config))
        if self.lora is not None:
            adapt_layers(model, self.decoder().layers_path, self.lora)
            adapters = {name: p.data for name, p in model.named_parameters() if is_adapter(name)}
            for name, values in drawn_like(adapters, seed=4).items():
                adapters[name].copy_(values)
        return model

    def decoder(self) -> Decoder:
        """Return the same model without weights. One thread at a time."""
        config = tiny_config(self.family, **dict(self.config))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return build_decoder(config, self.dtype, self.frozen, lora=self.lora)


@dataclass(slots=True, kw_only=True)
class Found:
    """What one rank found."""

    results: list[StepResult] = field(default_factory=list)
    evaluated: list[tuple[float, int]] = field(default_factory=list)
    state: State = field(default_factory=dict)
    """Of what it owns, flat, by kind and param."""


def ranks_of(case: RankCase) -> list[Found]:
    """Train as all ranks at once; return what each found."""
    model = case.model()
    return Together(case.size).run(lambda ranks: trained_by(ranks, case, model))


def virtual_of(case: RankCase) -> VirtualRanks:
    """Return the virtual ranks that must have the same bits."""
    model, decoder = case.model(), case.decoder()
    for param in decoder.params:
        model.get_parameter(param.name).requires_grad_(param.trained)
    if case.lora is not None or any(rate for name, rate in case.config if name.endswith("pdrop")):
        embedding = decoder.blocks[0].params[0].name.removesuffix(".weight")
        seed_like_engine(model, decoder.layers_path, embedding=embedding)
    optimizer = case.optimizer(kernel=TorchKernel())
    return VirtualRanks(model.train(), decoder, optimizer, case.size)


def store_for(case: RankCase, decoder: Decoder, ranks: Ranks, model: PreTrainedModel) -> Store:
    """Return a rank's store, filled from the model."""
    kinds = store_kinds(case.optimizer().states, waits=case.update == "late")
    store = Store(build_layout(decoder.blocks, kinds, ranks.owner))
    for param in decoder.params:
        owned = store.layout.places[param.name].owned
        values = model.get_parameter(param.name).detach().reshape(-1)[owned.start : owned.stop]
        store.param(param.name, TensorKind.HI).view(-1).copy_(values)
    return store


def engine_of(
    case: RankCase,
    ranks: Ranks,
    model: PreTrainedModel,
    device: Device | None = None,
    optimizer: Optimizer | None = None,
    deadline_s: float = 120.0,
) -> tuple[Engine, Store]:
    """Return a rank's engine and store; on the CPU ranks compute one at a time."""
    lanes = in_turn() if device is None else device.lanes()
    with ONE_AT_A_TIME:
        decoder = case.decoder()
        store = store_for(case, decoder, ranks, model)
        engine = Engine(
            decoder,
            store,
            optimizer=optimizer or case.optimizer(),
            settings=StepSettings(update=case.update, state=case.state, **dict(case.settings)),
            device=device or CpuDevice(copying=True),
            ranks=ranks,
            player=Player(lanes, deadline_s=deadline_s),
        )
    return engine, store


def trained_by(ranks: Ranks, case: RankCase, model: PreTrainedModel, **parts: Any) -> Found:
    """Train as one of `ranks`; `parts` are of the engine, if others than usual."""
    engine, store = engine_of(case, ranks, model, **parts)
    found = Found()
    with engine:
        for number, batch in enumerate(case.batches, start=1):
            found.results.append(engine.step(batch))
            if case.evaluates and number < case.num_steps:
                found.evaluated.append(engine.evaluate(batch))
    found.state = state_of(store)
    return found


def state_of(store: Store) -> State:
    """Return copies of the weights, remainders and moments of trained params that are here."""
    return {
        f"{kind}.{name}": store.param(name, kind).reshape(-1).clone()
        for name, place in store.layout.places.items()
        for kind in store.kinds
        if place.param.trained and place.has(kind) and kind is not TensorKind.GRAD
    }


def joined(found: Sequence[Found]) -> State:
    """Return the state of all ranks together."""
    return {name: torch.cat([one.state[name] for one in found]) for name in found[0].state}


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Return what differs between two states, by name."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
