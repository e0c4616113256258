"""L1: streamed equals resident, bit for bit, in every family.

Three chained steps with AdamW against the plain model under ordinary autograd: one micro-batch,
three unequal ones with padding, one packed by position ids. After each step the losses and every
gradient are compared, at the end every weight, master and moment. The plain side sums in fp32 where
the engine does by design, and updates separate fp32 masters with numpy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain import load_model
from megatrain.devices.device import CpuDevice
from megatrain.engine.engine import Engine
from megatrain.memory.kinds import TensorKind
from megatrain.memory.master import split_into
from megatrain.optim.adamw import AdamW
from megatrain.optim.kernel import AdamWScalars
from megatrain.optim.optimizer import decays
from megatrain.optim.states import M, V
from megatrain.step.settings import StepSettings
from testkit.cases import by_family, in_dtypes
from testkit.engines import make_engine
from testkit.families import FAMILIES, save_tiny
from testkit.plain import load_plain, make_batch, plain_gradients, seed_like_engine
from tests.optim.test_kernel import State, numpy_update

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RATE, DECAY = 1e-2, 0.1
BATCHES = [
    make_batch([(2, 24)], seed=1),
    make_batch([(2, 24), (1, 17), (3, 9)], seed=2, padded=True),
    make_batch([(2, 24), (1, 31)], seed=3, packed=True),
]
# Its layers draw random numbers while training; so must the plain side, from the same seeds.
RANDOM = {"phimoe"}
# The mask of its attention wants a gradient. torch then takes another sdpa kernel than in a forward
# without gradients, as recompute by any means does; with eager attention there is no such choice.
ATTENTION = {"doge": "eager"}


class PlainTraining:
    """The resident model, separate fp32 masters, AdamW by numpy."""

    def __init__(self, model: PreTrainedModel, decayed: dict[str, bool]) -> None:
        self.model, self.decayed, self.number = model, decayed, 0
        self.states = {
            name: State.of(param.detach().float().reshape(-1), split=False)
            for name, param in model.named_parameters()
        }

    def update(self, gradients: dict[str, Tensor]) -> None:
        self.number += 1
        for name, param in self.model.named_parameters():
            scalars = AdamWScalars.at(
                self.number,
                lr=RATE,
                betas=(0.9, 0.999),
                eps=1e-8,
                weight_decay=DECAY if self.decayed[name] else 0.0,
            )
            state = self.states[name]
            numpy_update(state, gradients[name].reshape(-1), scalars)
            param.data.copy_(rounded(state.weight, param.dtype).view_as(param))


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight that compute sees of a master: itself, or rounded half up to bf16."""
    if dtype is torch.float32:
        return master
    hi, lo = torch.empty_like(master, dtype=dtype), torch.empty_like(master, dtype=torch.int16)
    split_into(master, hi, lo)
    return hi


def differing(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    return [name for name in expected if not torch.equal(expected[name], found[name])]


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "dtype"), in_dtypes(FAMILIES))
def test_three_steps_equal_the_resident_model(
    family: str, dtype: Literal["bf16", "fp32"], tmp_path: Path
) -> None:
    train_both(family, dtype, tmp_path, StepSettings())


@pytest.mark.few(2)
@pytest.mark.parametrize("family", by_family(FAMILIES, others="night"))
def test_so_do_steps_that_keep_the_activations_of_all_layers(family: str, tmp_path: Path) -> None:
    """In slots that all layers take turns with, so that backward finds weights fetched again."""
    num_layers = len(load_model(save_tiny(tmp_path / "counted", family)).decoder.layers)
    settings = StepSettings(kept_layers=num_layers)
    train_both(family, "bf16", tmp_path / "trained", settings, CpuDevice(copying=True))


def train_both(
    family: str,
    dtype: Literal["bf16", "fp32"],
    folder: Path,
    settings: StepSettings,
    device: CpuDevice | None = None,
) -> None:
    """Assert that three steps of the engine are those of the resident model."""
    attention = ATTENTION.get(family)
    save_tiny(folder, family, DTYPES[dtype])
    model = load_model(folder, dtype=dtype, attn=attention)
    store, params = model.store, model.decoder.params
    plain = PlainTraining(
        load_plain(folder, DTYPES[dtype], attention), {p.name: decays(p) for p in params}
    )
    if family in RANDOM:
        seed_like_engine(plain.model, model.decoder.layers_path)
    optimizer = AdamW(learning_rate=RATE, weight_decay=DECAY)
    with Engine(
        model.decoder, store, optimizer=optimizer, settings=settings, device=device
    ) as engine:
        for batch in BATCHES:
            losses, gradients = plain_gradients(plain.model, batch, step=plain.number + 1)
            result = engine.step(batch)
            assert list(result.micro_losses) == losses
            found = {p.name: store.param(p.name, TensorKind.GRAD) for p in params}
            assert differing(gradients, found) == []
            plain.update(gradients)
        engine.synchronize()
    states = plain.states
    flat = {p.name: store.param(p.name, TensorKind.HI).reshape(-1) for p in params}
    assert differing({n: rounded(s.weight, flat[n].dtype) for n, s in states.items()}, flat) == []
    masters = {p.name: store.master(p.name).reshape(-1) for p in params}
    assert differing({n: s.weight for n, s in states.items()}, masters) == []
    for kind, moments in (
        (M, {n: s.m for n, s in states.items()}),
        (V, {n: s.v for n, s in states.items()}),
    ):
        found = {p.name: store.param(p.name, kind).reshape(-1) for p in params}
        assert differing(moments, found) == []


@pytest.mark.parametrize("broken", ["a dropped micro-batch", "a swapped layer"])
def test_a_difference_would_be_noticed(broken: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    model = load_model(tmp_path, dtype="bf16")
    plain = load_plain(tmp_path, torch.bfloat16)
    batch = make_batch([(2, 24), (1, 17)])
    if broken == "a swapped layer":
        for kind in (TensorKind.HI, TensorKind.LO):
            one, two = (model.store.block_bytes(block, kind) for block in (1, 2))
            swapped = two.clone()
            two.copy_(one)
            one.copy_(swapped)
    losses, gradients = plain_gradients(plain, batch)
    with Engine(model.decoder, model.store) as engine:
        result = engine.step(batch[:1] if broken == "a dropped micro-batch" else batch)
    found = {p.name: model.store.param(p.name, TensorKind.GRAD) for p in model.decoder.params}
    assert list(result.micro_losses) != losses
    assert len(differing(gradients, found)) > 30


@pytest.mark.parametrize(("tape", "kept_layers"), [("device", 0), ("host", 0), ("host", 1)])
def test_backward_has_the_dropout_of_forward(
    tape: Literal["device", "host"], kept_layers: int, tmp_path: Path
) -> None:
    rates = {"resid_pdrop": 0.2, "attn_pdrop": 0.2, "embd_pdrop": 0.2}
    save_tiny(tmp_path, "gpt2", torch.float32, **rates)
    model = load_model(tmp_path, dtype="fp32")
    plain = load_plain(tmp_path, torch.float32)
    batch = make_batch([(2, 24), (1, 17)])
    without = plain_gradients(plain.eval(), batch)
    seed_like_engine(plain.train(), model.decoder.layers_path, embedding="transformer.wte")
    losses, gradients = plain_gradients(plain, batch)
    with make_engine(model.decoder, model.store, tape=tape, kept_layers=kept_layers) as engine:
        result = engine.step(batch)
        found = {p.name: model.store.param(p.name, TensorKind.GRAD) for p in model.decoder.params}
        assert list(result.micro_losses) == losses
        assert differing(gradients, found) == []
        assert losses != without[0]
        assert engine.step(batch).micro_losses != result.micro_losses, "each step draws anew"


def test_the_callers_random_numbers_go_on(tmp_path: Path) -> None:
    model = load_model(save_tiny(tmp_path, "llama"))
    with Engine(model.decoder, model.store) as engine:
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        engine.step(make_batch([(1, 9)]))
        assert torch.equal(torch.rand(3), expected)
