"""The optimizer is a seam: Lion, with one state, trains as plain PyTorch does, bit for bit.

Three chained steps of tiny models, in both update policies, against the resident model under
ordinary autograd and a Lion that knows nothing of views.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from megatrain import AdamW, HostModel, load_model
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind, store_kinds
from megatrain.memory.master import split_into
from megatrain.optim.optimizer import HostOptimizer, decays
from megatrain.optim.views import Treatment, Views
from testkit.adamw_by_hand import global_norm
from testkit.engines import make_engine
from testkit.families import save_tiny
from testkit.lion import LION, Lion, PlainLion
from testkit.plain import load_plain, make_batch, plain_gradients

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RATE, DECAY, CLIP = 1e-2, 0.1, 0.5
BATCHES = [
    make_batch([(2, 24)], seed=1),
    make_batch([(2, 24), (1, 17), (3, 9)], seed=2, padded=True),
    make_batch([(2, 24)], seed=3, packed=True),
]
Update = Literal["in_backward", "late"]
Dtype = Literal["bf16", "fp32"]
State = dict[str, Tensor]


def make_lion(update: Update, kind: Callable[..., HostOptimizer] = Lion) -> HostOptimizer:
    clip = CLIP if update == "late" else None
    return kind(learning_rate=RATE, weight_decay=DECAY, max_grad_norm=clip)


def by_engine(folder: Path, dtype: Dtype, update: Update, optimizer: HostOptimizer) -> State:
    kinds = store_kinds(LION, waits=update == "late")
    home = load_model(folder, dtype=dtype, kinds=kinds)
    with make_engine(home.decoder, home.store, optimizer=optimizer, update=update) as engine:
        for batch in BATCHES:
            engine.step(batch)
    return state_of(home)


def state_of(home: HostModel) -> State:
    store, names = home.store, [param.name for param in home.decoder.params]
    return (
        {f"{name} weight": store.param(name, TensorKind.HI) for name in names}
        | {f"{name} master": store.master(name) for name in names}
        | {f"{name} m": store.param(name, *LION) for name in names}
    )


def by_plain_pytorch(folder: Path, dtype: Dtype, update: Update) -> tuple[State, list[float]]:
    model = load_plain(folder, DTYPES[dtype])
    params = load_model(folder, dtype=dtype, kinds=(TensorKind.HI,)).decoder.params
    plain = PlainLion(
        {name: param.detach() for name, param in model.named_parameters()},
        rate=RATE,
        weight_decay=DECAY,
        decayed=frozenset(param.name for param in params if decays(param)),
    )
    norms = []
    for number, batch in enumerate(BATCHES, start=1):
        _, gradients = plain_gradients(model, batch, step=number)
        norms.append(global_norm(gradients.values()))
        plain.update(gradients, min(1.0, CLIP / (norms[-1] + 1e-6)) if update == "late" else 1.0)
        for name, param in model.named_parameters():
            param.data.copy_(_rounded(plain.masters[name], param.dtype))
    return (
        {f"{name} weight": param.detach() for name, param in model.named_parameters()}
        | {f"{name} master": master for name, master in plain.masters.items()}
        | {f"{name} m": m for name, m in plain.momenta.items()}
    ), norms


def _rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight that compute sees of a master: the master, or half up in bf16."""
    hi = torch.empty_like(master, dtype=torch.bfloat16)
    split_into(master, hi, torch.empty_like(master, dtype=torch.int16))
    return master if dtype is torch.float32 else hi


def differing(first: State, second: State) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name, part in first.items() if not torch.equal(part, second[name])]


@pytest.mark.few(2)
@pytest.mark.parametrize("update", ["in_backward", "late"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_lion_trains_as_plain_pytorch_does(
    family: str, dtype: Dtype, update: Update, tmp_path: Path
) -> None:
    save_tiny(tmp_path, family, DTYPES[dtype])
    expected, norms = by_plain_pytorch(tmp_path, dtype, update)
    assert min(norms) > CLIP, "clipping must matter"
    assert differing(by_engine(tmp_path, dtype, update, make_lion(update)), expected) == []


class Climbing(Lion):
    """Steps against the sign."""

    def update(self, views: Views, gradient: Tensor, **counts: Any) -> None:
        Lion.update(self, views, -gradient, **counts)


class Forgetful(Lion):
    """Its state is not the store's."""

    def update(self, views: Views, gradient: Tensor, **counts: Any) -> None:
        kept = replace(views, states=tuple(state.clone() for state in views.states))
        Lion.update(self, kept, gradient, **counts)


class Even(Lion):
    """Decays norms and biases too."""

    def update(self, views: Views, gradient: Tensor, **counts: Any) -> None:
        Lion.update(self, replace(views, treatment=Treatment(1.0, DECAY)), gradient, **counts)


@pytest.mark.few(2)
@pytest.mark.parametrize("broken", [Climbing, Forgetful, Even])
def test_a_broken_lion_would_be_noticed(broken: type[Lion], tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.bfloat16)
    expected, _ = by_plain_pytorch(tmp_path, "bf16", "late")
    found = by_engine(tmp_path, "bf16", "late", make_lion("late", broken))
    assert differing(found, expected) != []


def test_a_store_without_a_state_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.bfloat16)
    home = load_model(tmp_path, kinds=store_kinds(LION, waits=True))
    with pytest.raises(ConfigError, match="the optimizer keeps v, which the store does not have"):
        make_engine(home.decoder, home.store, optimizer=AdamW(learning_rate=1e-3), update="late")
