"""Adapters of experts on the streamed model are those of PEFT's formula on the resident one.

Three chained steps with AdamW against autograd through `W + s B A`, with B A by einsum as PEFT
writes it down. Products by rows add up in another order, so within rounding; PEFT itself is in
proofs/adapters.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import PreTrainedModel

from megatrain import AdamW, HostModel, load_model
from megatrain.devices.device import CpuDevice
from megatrain.engine.engine import Engine
from megatrain.memory.kinds import TensorKind
from megatrain.models.adapters import params as adapted_params
from megatrain.models.adapters.lora import LoraConfig
from megatrain.models.template import Template
from megatrain.step.settings import StepSettings
from testkit.adamw_by_hand import HandAdamW
from testkit.families import save_tiny
from testkit.plain import load_plain, make_batch, plain_gradients
from testkit.plain_lora import drawn_like

LORA = LoraConfig(rank=3, alpha=6, target_modules=("experts",), target_parameters=("all-experts",))
CLOSE = 1e-4
EPS = 1e-4
"""AdamW's: a smaller one makes whole steps of what rounding leaves of gradients near zero, and how
much that is depends on the processor."""
BATCHES = [
    make_batch([(2, 24)], seed=1),
    make_batch([(2, 24), (1, 17)], seed=2, padded=True),
    make_batch([(1, 31)], seed=3),
]


class _Sum(nn.Module):
    """A param plus the product of its adapter, in PEFT's layout."""

    def __init__(self, a: Tensor, b: Tensor, *, transposed: bool) -> None:
        super().__init__()
        self.lora_A, self.lora_B = nn.Parameter(a.clone()), nn.Parameter(b.clone())
        self.form = "o r e, e r i -> e i o" if transposed else "o r e, e r i -> e o i"

    def forward(self, weight: Tensor) -> Tensor:
        experts = weight.shape[0]
        a = self.lora_A.reshape(experts, -1, self.lora_A.shape[-1])
        b = self.lora_B.reshape(self.lora_B.shape[0], -1, experts)
        return weight + torch.einsum(self.form, b, a) * LORA.scaling_of("")


def _adapted_plainly(model: PreTrainedModel, home: HostModel) -> dict[str, Tensor]:
    """Give a model adapters with the values of the store; returns them by our names."""
    adapters, store = home.decoder.adapters, home.store
    assert adapters is not None
    model.requires_grad_(False)
    found: dict[str, Tensor] = {}
    for name in adapters.params:
        path, _, param = name.rpartition(".")
        module = model.get_submodule(path)
        a, b = (store.param(f"{name}_lora_{half}", TensorKind.HI) for half in "AB")
        added = _Sum(a, b, transposed=bool(getattr(module, "is_transposed", False)))
        register_parametrization(module, param, added)
        found |= {f"{name}_lora_A": added.lora_A, f"{name}_lora_B": added.lora_B}
    return found


def _started(folder: Path, *targets: str) -> HostModel:
    lora = replace(LORA, target_modules=targets or LORA.target_modules)
    home = load_model(folder, dtype="fp32", lora=lora)
    names = [param.name for param in home.decoder.params if param.is_adapter]
    drawn = drawn_like({name: home.store.param(name, TensorKind.HI) for name in names}, seed=4)
    for name, values in drawn.items():
        home.store.param(name, TensorKind.HI).copy_(values)
    return home


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _worst(folder: Path, *targets: str, device: CpuDevice | None = None, **settings: Any) -> float:
    """Return by how much losses, gradients and masters of three steps differ, relative."""
    home = _started(folder, *targets)
    store, model = home.store, load_plain(folder, torch.float32)
    params = _adapted_plainly(model, home)
    by_path = {id(param): path for path, param in model.named_parameters()}
    by_hand = HandAdamW(
        {n: p.detach() for n, p in params.items()}, lr=1e-2, weight_decay=0.1, eps=EPS
    )
    worst = 0.0
    with Engine(
        home.decoder,
        store,
        optimizer=AdamW(learning_rate=1e-2, weight_decay=0.1, eps=EPS),
        settings=StepSettings(**settings),
        device=device,
    ) as engine:
        for number, batch in enumerate(BATCHES, start=1):
            losses, found = plain_gradients(model, batch, step=number)
            gradients = {name: found[by_path[id(param)]] for name, param in params.items()}
            mine = engine.step(batch).micro_losses
            worst = max(worst, _off(torch.tensor(mine), torch.tensor(losses)))
            worst = max(
                worst, *(_off(store.param(n, TensorKind.GRAD), g) for n, g in gradients.items())
            )
            by_hand.update(gradients, number)
            for name, param in params.items():
                param.data.copy_(by_hand.masters[name])
        engine.synchronize()
    assert len(params) == sum(param.trained for param in home.decoder.params)
    return max(worst, *(_off(store.param(n, TensorKind.HI), m) for n, m in by_hand.masters.items()))


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4_text", "jetmoe"])
def test_three_steps_are_those_of_the_sum(family: str, tmp_path: Path) -> None:
    targets = ("input_linear", "output_linear") if family == "jetmoe" else ()
    assert _worst(save_tiny(tmp_path, family, torch.float32), *targets) < CLOSE


@pytest.mark.parametrize("settings", [{"slots": 2, "tape": "host"}, {"kept_layers": 4}])
def test_so_are_steps_that_stream_and_steps_that_keep(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "qwen3_moe", torch.float32)
    assert _worst(folder, device=CpuDevice(copying=True), **settings) < CLOSE


def test_experts_of_another_layout_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B by expert, say, as A is: its shape would be the same."""
    real = adapted_params.factors

    def by_expert(shape: torch.Size, a: Tensor, b: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        turned = b.view(b.shape[0], shape[0], -1).transpose(1, 2).reshape(b.shape)
        return real(shape, a, turned, **how)

    monkeypatch.setattr(adapted_params, "factors", by_expert)
    assert _worst(save_tiny(tmp_path, "qwen3_moe", torch.float32)) > 1e-2


@pytest.mark.night
def test_compiled_layers_compute_the_sum(tmp_path: Path) -> None:
    home = _started(save_tiny(tmp_path, "qwen3_moe", torch.float32))
    plain = Template(home.decoder)
    compiled = Template(home.decoder, compile=True, backend="eager")
    table = home.store.param("model.embed_tokens.weight", TensorKind.HI)
    with torch.no_grad():
        hidden, calls = plain.front(
            {"model.embed_tokens.weight": table}, {"input_ids": BATCHES[0][0].input_ids}
        )
        weights = {
            p.name: home.store.param(p.name, TensorKind.HI) for p in home.decoder.blocks[1].params
        }
        one, other = (t.routed_layer(weights, hidden, calls[0])[0] for t in (plain, compiled))
    assert torch.allclose(one, other, atol=1e-5)
