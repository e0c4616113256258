"""Laws of Muon in the engine: whole matrices, once per step, whatever carries them to the device.

The oracle is torch's own Muon and AdamW over the resident model (testkit/plain_muon.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain import CpuDevice, HostModel, LoraConfig, Muon, load_model
from megatrain.engine.gradients import directions
from megatrain.memory.kinds import TensorKind, store_kinds
from megatrain.models.decoder import COMPUTE_DTYPES
from megatrain.optim import muon
from megatrain.optim.states import STATES
from testkit.engines import make_engine
from testkit.families import save_tiny
from testkit.plain import load_plain, make_batch
from testkit.plain_muon import trained_by_torch
from testkit.rank_training import RankCase, differing, joined, ranks_of, virtual_of

RATE, DECAY, CLIP = 1e-3, 0.1, 0.5
BATCHES = [make_batch([(2, 12), (1, 9)], seed=number) for number in range(3)]
UPDATES = ("late", "in_backward", "second_backward")


def load(folder: Path, dtype: Any, update: str = "late", state: str = "fp32") -> HostModel:
    kinds = store_kinds(STATES["muon"][state], waits=update == "late")
    return load_model(folder, dtype=dtype, kinds=kinds)


def make_muon(update: str = "late", **changes: Any) -> Muon:
    clip = None if update == "in_backward" else CLIP
    given: dict[str, Any] = {"learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": clip}
    return Muon(**(given | changes))


def trained(
    folder: Path,
    *,
    dtype: Any = "fp32",
    update: str = "late",
    state: str = "fp32",
    batches: Any = BATCHES,
    **settings: Any,
) -> dict[str, Tensor]:
    """Return weights, masters and states after a few steps."""
    home, optimizer = load(folder, dtype, update, state), make_muon(update, state=state)
    device = CpuDevice(copying=settings.pop("copying", False))
    with make_engine(
        home.decoder, home.store, optimizer=optimizer, device=device, update=update, **settings
    ) as engine:
        for batch in batches:
            engine.step(batch)
    return {
        f"{kind} {name}": home.store.param(name, kind).clone()
        for name, place in home.store.layout.places.items()
        for kind in home.store.kinds
        if place.has(kind) and kind is not TensorKind.GRAD
    }


def by_torch(folder: Path, update: str, batches: Any = BATCHES) -> dict[str, Tensor]:
    model, home = load_plain(folder, torch.float32), load(folder, "fp32")
    clip = make_muon(update).clip_factor
    found = trained_by_torch(model, home.decoder, batches, clip, rate=RATE, weight_decay=DECAY)
    return {f"hi {name}": weight for name, weight in found.items()}


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.few(3)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_weights_are_those_of_torch(
    family: str, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One expert at a time: a product of several at once has other last bits."""
    monkeypatch.setattr(muon, "AT_ONCE", 1)
    folder = save_tiny(tmp_path, family, torch.float32)
    assert furthest(trained(folder, update=update), by_torch(folder, update)) < 1e-6


@pytest.mark.parametrize("damage", ["matrices in halves", "never orthogonalized"])
def test_a_matrix_that_is_not_whole_would_be_noticed(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(tmp_path, "llama", torch.float32)

    def halves(matrix: Tensor) -> None:
        for half in matrix.chunk(2):
            muon.orthogonalize(half)

    broken = halves if damage == "matrices in halves" else lambda matrix: None
    monkeypatch.setattr(directions, "orthogonalize", broken)
    assert furthest(trained(folder), by_torch(folder, "late")) > 1e-5


WAYS: tuple[dict[str, Any], ...] = (
    {"copying": True},
    {"copying": True, "grad_slots": 1, "tape": "host", "slots": 3},
    {"reference": True},
)


@pytest.mark.few(5)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("update", UPDATES)
def test_the_way_to_the_device_changes_no_bit(
    update: str, way: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "llama", torch.bfloat16, tie_word_embeddings=False)
    case: dict[str, Any] = {"dtype": "bf16", "update": update, "state": "bf16"}
    assert different(trained(folder, **case, **way), trained(folder, **case)) == []


@pytest.mark.parametrize("state", STATES["muon"])
def test_a_second_backward_has_the_bits_of_late_clipping(state: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", torch.bfloat16)
    late, twice = (
        trained(folder, dtype="bf16", update=update, state=state, copying=True)
        for update in ("late", "second_backward")
    )
    assert different(late, twice) == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_micro_batch_that_comes_twice_has_the_bits_of_one(dtype: str, tmp_path: Path) -> None:
    """Halves add up exactly, so nothing but a second momentum or matrix could differ."""
    folder = save_tiny(tmp_path, "llama", COMPUTE_DTYPES[dtype])
    once = [make_batch([(2, 12)], seed=number) for number in range(3)]
    twice = [[*batch, *batch] for batch in once]
    one, two = (trained(folder, dtype=dtype, batches=batches) for batches in (once, twice))
    assert different(one, two) == []


def test_one_momentum_for_each_micro_batch_would_be_noticed(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", torch.float32)
    whole = [make_batch([(2, 12), (2, 12)], seed=number) for number in range(2)]
    apart = [[micro] for batch in whole for micro in batch]
    assert different(trained(folder, batches=whole), trained(folder, batches=apart))


RANK_CASES = [
    RankCase(optimizer_name="muon"),
    RankCase(optimizer_name="muon", size=3, update="in_backward", dtype="fp32"),
    RankCase(optimizer_name="muon", size=3, family="mixtral", state="bf16"),
    RankCase(optimizer_name="muon", update="second_backward", state="8bit"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("case", RANK_CASES, ids=lambda case: f"{case.family} {case.update}")
def test_ranks_have_the_bits_of_virtual_ranks(case: RankCase) -> None:
    found, virtual = ranks_of(case), virtual_of(case)
    for result, batch in zip(found[0].results, case.batches, strict=True):
        losses, gradients = virtual.gradients(batch)
        assert list(result.micro_losses) == losses
        norm = result.grad_norm
        virtual.update(gradients, 1.0 if norm is None else case.optimizer().clip_factor(norm))
    assert differing(joined(found), virtual.state()) == []


def test_a_part_of_a_rank_is_not_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that orthogonalize what each has, without the other's part, are noticed."""
    case = RANK_CASES[0]
    expected = joined(ranks_of(case))
    monkeypatch.setattr(directions.Directions, "collect", lambda self, op: 0)
    assert differing(joined(ranks_of(case)), expected)


def test_layers_have_momenta_and_all_others_the_moments_of_adamw(tmp_path: Path) -> None:
    home = load(save_tiny(tmp_path, "qwen3", tie_word_embeddings=False), "bf16")
    v = STATES["muon"]["fp32"][1]
    without = {name for name, place in home.store.layout.places.items() if not place.has(v)}
    matrices = {name for block in home.decoder.blocks for name in block.hidden_matrices}
    assert without == matrices
    assert all(name.endswith("proj.weight") for name in matrices)
    assert len(matrices) == 7 * len(home.decoder.layers)


def test_adapters_are_matrices_of_their_layers(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", torch.float32)
    kinds = store_kinds(STATES["muon"]["fp32"], waits=True)
    home = load_model(folder, dtype="fp32", kinds=kinds, lora=LoraConfig(rank=4, alpha=8))
    before = {n: home.store.param(n, TensorKind.HI).clone() for n in home.store.layout.places}
    with make_engine(home.decoder, home.store, optimizer=make_muon()) as engine:
        for batch in BATCHES:
            engine.step(batch)
    moved = {
        n for n, old in before.items() if not torch.equal(old, home.store.param(n, TensorKind.HI))
    }
    assert moved == {param.name for param in home.decoder.params if param.is_adapter}


def test_a_gradient_that_is_not_finite_moves_no_momentum(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama", torch.float32)
    home = load(folder, "fp32")
    with make_engine(
        home.decoder, home.store, optimizer=make_muon(), on_nonfinite="skip"
    ) as engine:
        engine.step(BATCHES[0])
        engine.synchronize()
        m = STATES["muon"]["fp32"][0]
        before = {n: home.store.param(n, m).clone() for n in home.store.layout.places}
        name = next(iter(home.decoder.blocks[2].hidden_matrices))
        weight = home.store.param(name, TensorKind.HI)
        kept = weight.clone()
        weight.fill_(float("nan"))
        assert not engine.step(BATCHES[1]).applied
        weight.copy_(kept)
        engine.synchronize()
    assert all(torch.equal(home.store.param(n, m), old) for n, old in before.items())


def test_a_snapshot_waits_for_the_momentum_too(tmp_path: Path) -> None:
    """A block that a reader holds has the momentum of its step until it is let go."""
    home = load(save_tiny(tmp_path), "bf16")
    m, name = STATES["muon"]["fp32"][0], next(iter(home.decoder.blocks[1].hidden_matrices))
    with make_engine(home.decoder, home.store, optimizer=make_muon()) as engine:
        engine.step(BATCHES[0])
        engine.synchronize()
        snapshot = engine.snapshot()
        snapshot.wait(1)
        held = home.store.param(name, m).clone()
        engine.step(BATCHES[1])  # leaves its updates to the next
        assert torch.equal(home.store.param(name, m), held)
        for block in snapshot.order:
            snapshot.let_go(block)
        engine.synchronize()
        assert not torch.equal(home.store.param(name, m), held)
