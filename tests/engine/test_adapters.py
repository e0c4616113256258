"""Adapters on the streamed model are LoRA on the resident one, bit for bit.

Three chained steps with AdamW and dropout against a textbook's LoRA under ordinary autograd. After
each step the losses and every adapter's gradient are compared, at the end masters and moments; the
base must have kept every bit. The other oracle, PEFT, is in proofs/adapters.
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
from megatrain.choices import ALL_EXPERTS
from megatrain.devices.device import CpuDevice
from megatrain.engine.engine import Engine
from megatrain.memory.kinds import TensorKind
from megatrain.memory.master import split_into
from megatrain.models.adapters.lora import AdaptedLinear, LoraConfig
from megatrain.models.compiled import representatives
from megatrain.models.template import Template
from megatrain.optim.states import M, V
from megatrain.step.ops import OpKind
from megatrain.step.settings import StepSettings
from testkit.adamw_by_hand import HandAdamW
from testkit.cases import at_a_push
from testkit.families import COVERING, save_tiny
from testkit.plain import load_plain, make_batch, plain_gradients, seed_like_engine
from testkit.plain_lora import adapt_plainly, drawn_like, named_as_ours

OTHERS = [(family, dtype) for family in COVERING if family != "llama" for dtype in ("bf16", "fp32")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RATE, DECAY = 1e-2, 0.1
LORA = LoraConfig(rank=4, alpha=6, dropout=0.25)
BATCHES = [
    make_batch([(2, 24)], seed=1),
    make_batch([(2, 24), (1, 17), (3, 9)], seed=2, padded=True),
    make_batch([(2, 24), (1, 31)], seed=3, packed=True),
]
Dtype = Literal["bf16", "fp32"]


def _rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    hi, lo = torch.empty_like(master, dtype=dtype), torch.empty_like(master, dtype=torch.int16)
    if dtype is torch.float32:
        return master
    split_into(master, hi, lo)
    return hi


def _started(folder: Path, dtype: Dtype, lora: LoraConfig = LORA) -> HostModel:
    """Return a model whose adapters are not zero anywhere."""
    home = load_model(folder, dtype=dtype, lora=lora)
    names = [param.name for param in home.decoder.params if param.is_adapter]
    drawn = drawn_like({name: home.store.param(name, TensorKind.HI) for name in names}, seed=4)
    for name, values in drawn.items():
        home.store.param(name, TensorKind.HI).copy_(values)
        if home.store.layout.places[name].has(TensorKind.LO):
            home.store.param(name, TensorKind.LO).zero_()
    return home


def _train_both(
    folder: Path, dtype: Dtype, device: CpuDevice | None = None, **settings: Any
) -> None:
    """Assert that three steps of the engine are those of the resident model."""
    home = _started(folder, dtype)
    store, adapters = home.store, home.decoder.adapters
    assert adapters is not None
    names = [param.name for param in home.decoder.params if param.is_adapter]
    before = {
        param.name: store.param(param.name, TensorKind.HI).clone() for param in home.decoder.params
    }
    model = load_plain(folder, DTYPES[dtype])
    values = {name: before[name] for name in names}
    adapt_plainly(
        model, adapters.modules, values, scaling=adapters.lora.scaling_of(""), dropout=LORA.dropout
    )
    seed_like_engine(model, home.decoder.layers_path)
    by_hand = HandAdamW({n: v.float() for n, v in values.items()}, lr=RATE, weight_decay=DECAY)
    optimizer = AdamW(learning_rate=RATE, weight_decay=DECAY)
    with Engine(
        home.decoder,
        store,
        optimizer=optimizer,
        settings=StepSettings(**settings),
        device=device,
    ) as e:
        for number, batch in enumerate(BATCHES, start=1):
            losses, found = plain_gradients(model, batch, step=number)
            gradients = named_as_ours(found)
            assert list(e.step(batch).micro_losses) == losses
            assert gradients.keys() == set(names)
            differing = [
                n for n in names if not torch.equal(gradients[n], store.param(n, TensorKind.GRAD))
            ]
            assert differing == []
            by_hand.update(gradients, number)
            for name, param in named_as_ours(dict(model.named_parameters())).items():
                param.data.copy_(_rounded(by_hand.masters[name], param.dtype))
        e.synchronize()
    for name in names:
        assert torch.equal(store.master(name), by_hand.masters[name])
        assert not torch.equal(store.param(name, TensorKind.HI), before[name])
        assert torch.equal(store.param(name, M), by_hand.m[name])
        assert torch.equal(store.param(name, V), by_hand.v[name])
    for name in before.keys() - set(names):
        assert torch.equal(store.param(name, TensorKind.HI), before[name])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "bf16"),
        ("llama", "fp32"),
        *[pytest.param(*case.values[0], marks=case.marks) for case in at_a_push(OTHERS, 2)],
    ],
)
def test_three_steps_equal_a_plain_lora(family: str, dtype: Dtype, tmp_path: Path) -> None:
    _train_both(save_tiny(tmp_path, family, DTYPES[dtype]), dtype)


@pytest.mark.parametrize("settings", [{"slots": 2, "tape": "host"}, {"kept_layers": 4}])
def test_so_do_steps_that_stream_and_steps_that_keep(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    _train_both(save_tiny(tmp_path, "qwen2"), "bf16", CpuDevice(copying=True), **settings)


def _slightly_more(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: AdaptedLinear, given: Tensor) -> Tensor:
        scaling = self.lora_scaling
        self.lora_scaling *= 1 + 1e-6
        try:
            return real(self, given)
        finally:
            self.lora_scaling = scaling

    return forward


def test_a_factor_that_is_a_little_wrong_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdaptedLinear, "forward", _slightly_more(AdaptedLinear.forward))
    with pytest.raises(AssertionError):
        _train_both(save_tiny(tmp_path, "llama", torch.float32), "fp32")


def test_other_random_numbers_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a recompute, say: dropout is drawn by seed, step, block and micro-batch."""
    monkeypatch.setattr("testkit.plain.draw_seed", lambda *numbers: sum(numbers))
    with pytest.raises(AssertionError):
        _train_both(save_tiny(tmp_path, "llama", torch.float32), "fp32")


def test_what_has_no_adapter_below_is_not_visited_and_what_has_none_is_not_drained(
    tmp_path: Path,
) -> None:
    home = _started(save_tiny(tmp_path), "bf16", replace(LORA, target_modules=("layers.2.mlp.*",)))
    device = CpuDevice(copying=True)
    with Engine(
        home.decoder, home.store, optimizer=AdamW(learning_rate=1.0), device=device, trace=True
    ) as engine:
        engine.step(BATCHES[0])
        engine.synchronize()
        assert engine.trace is not None
        played = [span.op for span in engine.trace.spans]
    blocks = {kind: {op.block for op in played if op.kind is kind} for kind in OpKind}
    assert blocks[OpKind.BACKWARD] == {4, 3}
    assert blocks[OpKind.DRAIN] == blocks[OpKind.NORM] == blocks[OpKind.UPDATE] == {3}
    passing = {op.block for op in played if op.kind is OpKind.BACKWARD and op.passes_gradient}
    assert passing == {4}


def test_layers_with_adapters_are_cut_into_tiles(tmp_path: Path) -> None:
    """Near the full rows: a tile draws its own dropout, so without."""
    folder = save_tiny(tmp_path, "llama", torch.float32)
    found = []
    for tile_tokens in (None, 8):
        home = _started(folder, "fp32", replace(LORA, dropout=0.0))
        assert None not in Template(home.decoder, tiled=True).cuts
        settings = StepSettings(tile_tokens=tile_tokens)
        with Engine(home.decoder, home.store, settings=settings) as engine:
            loss = engine.step(BATCHES[0]).loss
        names = [param.name for param in home.decoder.params if param.is_adapter]
        found.append(
            (loss, torch.cat([home.store.param(n, TensorKind.GRAD).view(-1) for n in names]))
        )
    (loss, whole), (near_loss, near) = found
    assert near_loss == pytest.approx(loss, rel=1e-6)
    assert float((whole - near).norm()) < 1e-6 * float(whole.norm())
    assert not torch.equal(whole, near), "nothing was cut"


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_without_adapters_it_is_the_model_under_them(tmp_path: Path, family: str) -> None:
    folder = save_tiny(tmp_path, family, torch.float32)
    home = _started(
        folder,
        "fp32",
        replace(LORA, target_parameters=(ALL_EXPERTS,)) if family != "llama" else LORA,
    )
    base = load_model(folder, dtype="fp32")
    with Engine(home.decoder, home.store) as engine, Engine(base.decoder, base.store) as plain:
        expected = plain.logprobs(BATCHES[1])
        adapted = engine.logprobs(BATCHES[1])
        off = engine.logprobs(BATCHES[1], reference=True)
        assert all(map(torch.equal, off, expected))
        assert not any(map(torch.equal, adapted, expected))
        assert all(map(torch.equal, engine.logprobs(BATCHES[1]), adapted)), "they are on again"


def test_layers_with_adapters_have_one_structure_to_compile(tmp_path: Path) -> None:
    home = load_model(save_tiny(tmp_path), lora=LORA)
    assert representatives(list(home.decoder.layers)) == [0, 0, 0, 0]


@pytest.mark.night
def test_compiled_layers_with_adapters_share_a_graph(tmp_path: Path) -> None:
    home = _started(save_tiny(tmp_path, "llama", torch.float32), "fp32")
    graphs = []

    def backend(graph: Any, _inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    plain = Template(home.decoder)
    compiled = Template(home.decoder, compile=True, backend=backend)
    ids = BATCHES[0][0].input_ids
    table = home.store.param("model.embed_tokens.weight", TensorKind.HI)
    with torch.no_grad():
        hidden, calls = plain.front({"model.embed_tokens.weight": table}, {"input_ids": ids})
        for block, call in zip(home.decoder.blocks[1:-1], calls, strict=True):
            weights = {p.name: home.store.param(p.name, TensorKind.HI) for p in block.params}
            outputs = []
            for template in (plain, compiled):
                torch.manual_seed(block.index)
                outputs.append(template.routed_layer(weights, hidden, call)[0])
            assert torch.equal(*outputs)
    assert len(graphs) == 1
