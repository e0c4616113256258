"""AdamW on the store: the textbook's masters to the bit, each param with its own decay."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.trainer import Trainer

from megatrain.memory.kinds import TensorKind
from megatrain.memory.layout import build_layout
from megatrain.memory.master import split_into
from megatrain.memory.store import Store
from megatrain.models.build import build_decoder
from megatrain.models.decoder import Block, Param
from megatrain.optim.adamw import AdamW
from megatrain.optim.kernel import Kernel
from megatrain.optim.native import load_kernel
from megatrain.optim.optimizer import decays
from megatrain.optim.states import WITH_CLIP, M, V
from megatrain.optim.torch_kernel import TorchKernel
from megatrain.optim.views import UpdateViews
from megatrain.step.ops import Role
from testkit.adamw_by_hand import HandAdamW
from testkit.families import tiny_config, tiny_model

BF16, FP32 = torch.bfloat16, torch.float32
SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def param(name: str, *shape: int, dtype: torch.dtype = BF16, trained: bool = True) -> Param:
    return Param(name=name, shape=shape, dtype=dtype, trained=trained)


# Sizes that leave padding; runs of decay, none, decay; an fp32 part; a frozen one between.
PARAMS = (
    param("layers.0.q_proj.weight", 9, 15),
    param("layers.0.k_proj.weight", 3, 5),
    param("layers.0.q_proj.bias", 9),
    param("layers.0.frozen.weight", 4, 4, trained=False),
    param("layers.0.input_layernorm.weight", 15),
    param("layers.0.up_proj.weight", 17, 15),
    param("layers.0.router.weight", 4, 15, dtype=FP32),
    param("layers.0.router.bias", 3, dtype=FP32),
)
NOT_DECAYED = {"layers.0.q_proj.bias", "layers.0.input_layernorm.weight", "layers.0.router.bias"}
DECAYED = {p.name for p in PARAMS if p.trained} - NOT_DECAYED
TRAINED = [p.name for p in PARAMS if p.trained]


@pytest.fixture
def store() -> Store:
    store = Store(build_layout([Block(index=0, role=Role.LAYER, params=PARAMS)], WITH_CLIP))
    generator = torch.Generator().manual_seed(0)
    for each in PARAMS:
        master = torch.randn(each.shape, generator=generator)
        weight = store.param(each.name, TensorKind.HI)
        if each.dtype is BF16 and each.trained:
            split_into(master, weight, store.param(each.name, TensorKind.LO))
        else:
            weight.copy_(master)
    return store


def put_gradients(store: Store, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gradients = {}
    for name in TRAINED:
        gradient = store.param(name, TensorKind.GRAD)
        gradient.copy_(torch.randn(gradient.shape, generator=generator))
        gradients[name] = gradient.clone()
    return gradients


def update(
    store: Store, optimizer: AdamW, number: int, scale: float = 1.0, step: int | None = None
) -> None:
    step = number if step is None else step
    update_views = UpdateViews(store, optimizer)
    for segment in store.layout.trained_segments(0):
        gradient = store.segment(segment, TensorKind.GRAD)
        for span, views in update_views.of(segment):
            optimizer.update(views, gradient[span], step=step, number=number, scale=scale)


def by_hand(store: Store, lr: float = 1e-2, decayed: set[str] = DECAYED) -> HandAdamW:
    masters = {name: store.master(name) for name in TRAINED}
    return HandAdamW(masters, lr=lr, decays=decayed.__contains__, **SETTINGS)  # type: ignore[arg-type]


def differing(store: Store, hand: HandAdamW) -> list[str]:
    return [
        name
        for name in TRAINED
        if not torch.equal(store.master(name), hand.masters[name])
        or not torch.equal(store.param(name, M), hand.m[name])
        or not torch.equal(store.param(name, V), hand.v[name])
    ]


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("kernel", [load_kernel(), TorchKernel()], ids=["default", "torch"])
def test_each_param_is_the_textbooks_fp32_master(
    store: Store, kernel: Kernel, scale: float
) -> None:
    optimizer = AdamW(learning_rate=1e-2, kernel=kernel, **SETTINGS)  # type: ignore[arg-type]
    hand = by_hand(store)
    for number in range(1, 11):
        gradients = put_gradients(store, number)
        update(store, optimizer, number, scale)
        hand.update(gradients, number, scale)
        assert differing(store, hand) == []


def test_another_decay_step_or_scale_would_be_noticed(store: Store) -> None:
    optimizer = AdamW(learning_rate=1e-2, **SETTINGS)  # type: ignore[arg-type]
    everything, shifted, scaled = (
        by_hand(store, decayed=set(TRAINED)),
        by_hand(store),
        by_hand(store),
    )
    gradients = put_gradients(store, 1)
    update(store, optimizer, 1)
    everything.update(gradients, 1)
    shifted.update(gradients, 2)
    scaled.update(gradients, 1, scale=0.999)
    assert set(differing(store, everything)) == set(TRAINED) - DECAYED
    assert set(differing(store, shifted)) == set(TRAINED)
    assert set(differing(store, scaled)) == set(TRAINED)


def test_frozen_params_and_padding_stay_as_they_were(store: Store) -> None:
    optimizer = AdamW(learning_rate=1e-2, **SETTINGS)  # type: ignore[arg-type]
    frozen = store.param("layers.0.frozen.weight", TensorKind.HI).clone()
    padding = {
        (number, kind): padding_of(store, number, kind)
        for number, segment in enumerate(store.layout.trained_segments(0))
        for kind in segment.starts
    }
    for number in range(1, 6):
        put_gradients(store, number)
        update(store, optimizer, number)
    assert torch.equal(store.param("layers.0.frozen.weight", TensorKind.HI), frozen)
    assert len(padding) == 9
    for (number, kind), mask in padding.items():
        segment = store.layout.trained_segments(0)[number]
        assert mask.any()
        assert not store.segment(segment, kind)[mask].any(), kind


def padding_of(store: Store, number: int, kind: TensorKind) -> Tensor:
    segment = store.layout.trained_segments(0)[number]
    mask = torch.ones(segment.num_elements, dtype=torch.bool)
    for place in store.layout.segment_places(segment):
        mask[place.start : place.start + place.param.num_elements] = False
    return mask


def test_the_learning_rate_is_asked_for_each_step_counted_from_zero(store: Store) -> None:
    asked: list[int] = []

    def rate(step: int) -> float:
        asked.append(step)
        return 1e-3 * (step + 1)

    optimizer = AdamW(learning_rate=rate, **SETTINGS)  # type: ignore[arg-type]
    hand = by_hand(store)
    for number in (1, 2, 3):
        gradients = put_gradients(store, number)
        update(store, optimizer, number)
        hand._lr = 1e-3 * number
        hand.update(gradients, number)
    assert differing(store, hand) == []
    assert sorted(set(asked)) == [0, 1, 2]


def test_the_rate_follows_the_step_and_the_bias_correction_the_update(store: Store) -> None:
    """Steps 2 and 3 were skipped: the second update has the rate of step 4."""
    optimizer = AdamW(learning_rate=lambda step: 1e-3 * (step + 1), **SETTINGS)  # type: ignore[arg-type]
    hand, by_update = by_hand(store), by_hand(store)
    for number, step in ((1, 1), (2, 4)):
        gradients = put_gradients(store, number)
        update(store, optimizer, number, step=step)
        hand._lr, by_update._lr = 1e-3 * step, 1e-3 * number
        hand.update(gradients, number)
        by_update.update(gradients, number)
    assert differing(store, hand) == []
    assert differing(store, by_update) != []


def test_it_keeps_no_state_of_its_own(store: Store) -> None:
    """A new one goes on where the last one was: all there is to save is the store."""
    hand = by_hand(store)
    for number in range(1, 5):
        gradients = put_gradients(store, number)
        update(store, AdamW(learning_rate=1e-2, **SETTINGS), number)  # type: ignore[arg-type]
        hand.update(gradients, number)
    assert differing(store, hand) == []


# Runs and what decays.


def test_runs_number_the_trained_elements_of_the_store(store: Store) -> None:
    """One after the other, over all segments, padding included: no two elements share a number."""
    update_views = UpdateViews(store, AdamW(learning_rate=1e-2, weight_decay=0.1))
    numbers = [
        (views.first, views.first + views.weight.numel())
        for segment in store.layout.segments
        if segment.trained
        for _, views in update_views.of(segment)
    ]
    stops = [stop for _, stop in numbers]
    assert [first for first, _ in numbers] == [0, *stops[:-1]]
    assert stops[-1] == sum(s.num_elements for s in store.layout.segments if s.trained)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", (8, 4), True),
        ("model.embed_tokens.weight", (8, 4), True),
        ("model.layers.0.mlp.experts.down_proj", (2, 8, 4), True),
        ("model.layers.0.input_layernorm.weight", (4,), False),
        ("model.norm.weight", (4,), False),
        ("model.layers.0.self_attn.q_proj.bias", (4,), False),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (2, 4), False),
        ("model.layers.0.self_attn.q_norm.weight", (2, 4), False),
        ("model.layers.0.self_attn.k_layernorm.weight", (2, 4), False),
        ("model.norm.weight", (2, 4), False),
        ("weight", (2, 4), True),
        ("model.layers.0.self_attn.sinks", (4,), True),
        ("model.layers.0.mamba.A_log", (4,), True),
        ("model.layers.0.mamba.dt_bias", (4,), False),
        ("transformer.h.0.ln_1.weight", (4,), False),
    ],
)
def test_all_but_norms_and_biases_decay(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert decays(param(name, *shape)) == expected


NORMS_THAT_TRANSFORMERS_DECAYS = {"norm_f", "post_norm1", "post_norm2"}
"""Its patterns of names do not find them."""


@pytest.mark.parametrize(
    "family", ["gpt2", "gpt_oss", "mamba2", "falcon_h1", "qwen3_next", "gemma2", "hyperclovax"]
)
def test_what_decays_is_what_transformers_decays(family: str) -> None:
    model = tiny_model(family, torch.bfloat16)
    named = dict(model.named_parameters())
    theirs = named.keys() & Trainer.get_decay_parameter_names(None, model)
    ours = {name for name, value in named.items() if decays(param(name, *value.shape))}
    assert ours <= theirs
    assert {name.split(".")[-2] for name in theirs - ours} <= NORMS_THAT_TRANSFORMERS_DECAYS


def test_norms_over_heads_do_not_decay() -> None:
    """Cohere's have one row per head: two dimensions, and still a norm."""
    decoder = build_decoder(tiny_config("cohere", use_qk_norm=True), "bf16")
    norms = [p for p in decoder.params if "norm" in p.name]
    assert any(len(p.shape) == 2 for p in norms)
    assert not any(map(decays, norms))


# Clipping.


@pytest.mark.parametrize("length", [0.0, 1e-9, 0.3, 0.999999, 1.0, 1.000001, 7.0, 1e20])
@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 100.0])
def test_the_clip_factor_is_torchs(store: Store, max_norm: float, length: float) -> None:
    optimizer = AdamW(learning_rate=1e-2, max_grad_norm=max_norm)
    gradient = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    gradient.grad = torch.tensor([0.6, 0.8], dtype=torch.float64) * length
    norm = float(torch.nn.utils.clip_grad_norm_([gradient], max_norm))
    expected = torch.tensor([0.6, 0.8], dtype=torch.float64) * length
    torch.testing.assert_close(
        expected * optimizer.clip_factor(norm), gradient.grad, rtol=1e-12, atol=0
    )


def test_without_a_limit_nothing_is_clipped(store: Store) -> None:
    optimizer = AdamW(learning_rate=1e-2)
    assert [optimizer.clip_factor(norm) for norm in (0.0, 1.0, 1e30)] == [1.0] * 3


def test_the_squared_norm_is_that_of_all_elements_and_tells_what_is_not_finite(
    store: Store,
) -> None:
    optimizer = AdamW(learning_rate=1e-2)
    gradient = torch.randn(100_000).bfloat16()
    expected = math.fsum(gradient.double().square().tolist())
    assert optimizer.squared_norm(gradient) == pytest.approx(expected, rel=1e-12)
    for value in (math.nan, math.inf, -math.inf):
        gradient[77] = value
        assert not math.isfinite(optimizer.squared_norm(gradient))


def test_a_scale_that_is_not_finite_is_refused(store: Store) -> None:
    put_gradients(store, 1)
    before = {name: store.master(name) for name in TRAINED}
    with pytest.raises(AssertionError):
        update(store, AdamW(learning_rate=1e-2), 1, math.nan)
    assert all(torch.equal(store.master(name), before[name]) for name in TRAINED)
