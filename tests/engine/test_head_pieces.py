"""The head by pieces of the vocabulary: gradients of plain autograd, bits of the reference.

Sums over the vocabulary have another order than in one product, so gradients are those of the
resident model within 1e-6 of its norm, in fp32, and no param's gradient is off by more than 1e-5 of
its own. Played twice, on lanes or one op at a time, they are the same to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import pytest
from torch import Tensor

from megatrain.devices.accelerator import Accelerator
from megatrain.devices.device import CpuDevice
from megatrain.errors import ConfigError
from megatrain.losses import pieces
from megatrain.losses.preferences import Dpo
from megatrain.memory.kinds import Kind
from megatrain.models.template import Template
from megatrain.optim.states import M
from megatrain.step.shape import Update
from proofs.races import CONFIGS
from testkit.cases import at_a_push
from testkit.pair_loss import with_pairs
from testkit.plain import plain_gradients
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched
from testkit.states import steps_of
from testkit.worlds import SIZES, Case, Sort, World, make_batch

VOCABULARY = 512
BETA1 = 0.9
FROZEN = {
    "llama, head frozen": ("lm_head.*", "model.norm.*"),
    "llama, table frozen": ("lm_head.*",),
    "llama, norm frozen": ("model.norm.*",),
    "llama, all but the head frozen": ("model.*",),
}
MODELS = ["llama", "qwen3", "gpt_oss", *FROZEN]
BATCH = make_batch(((2, 6), (1, 4), (1, 7)), seed=2)


@functools.cache
def world_of(model: str) -> World:
    sizes = SIZES | {"num_hidden_layers": 2, "vocab_size": VOCABULARY}
    config = CONFIGS[model.split(",")[0]]
    return World(Sort(config=lambda: config(**sizes), dtype="fp32", frozen=FROZEN.get(model, ())))


@functools.cache
def expected(model: str, num_micro: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of the resident model."""
    world = world_of(model)
    world.rewind()
    return plain_gradients(world.plain().train(), BATCH[:num_micro])


def errors(world: World, case: Case, num_micro: int, **changes: Any) -> dict[str, float]:
    """Return how far each gradient is from that of the resident model, over its norm."""
    losses, gradients = expected(next(m for m in MODELS if world_of(m) is world), num_micro)
    optimizer = None if case.update == "none" else world.optimizer(max_grad_norm=None)
    with world.engine(case, optimizer=optimizer, router_aux_loss=0.0, **changes) as engine:
        result = engine.step(BATCH[:num_micro])
        engine.settle()
    kind, scale = (Kind.GRAD, 1.0) if case.update == "none" else (M, 1 - BETA1)
    found = {p.name: world.store.param(p.name, kind) for p in world.decoder.params if p.trained}
    distances = {
        name: float((one / scale - gradients[name]).norm() / gradients[name].norm())
        for name, one in found.items()
    }
    norm = sum(float(gradients[name].norm()) ** 2 for name in found) ** 0.5
    distance = sum(float((one / scale - gradients[n]).norm()) ** 2 for n, one in found.items())
    pairs = zip(result.micro_losses, losses, strict=True)
    loss = max(abs(one - other) / other for one, other in pairs)
    return distances | {"all": distance**0.5 / norm, "loss": loss}


Tape = Literal["device", "host"]
UPDATES: tuple[Update, ...] = ("none", "in_backward", "late")
TAPES: tuple[Tape, ...] = ("device", "host")


def cases(models: Sequence[str], head_pieces: Sequence[int]) -> list[Case]:
    """Return all of them, wherever things are kept."""
    return [
        Case(
            sort=model,
            steps=steps_of(3),
            update=update,
            head_pieces=count,
            grad_slots=grad_slots,
            tape=tape,
            copying=copying,
        )
        for model, count, update, grad_slots, tape, copying in product(
            models, head_pieces, UPDATES, (1, 2), TAPES, (True, False)
        )
    ]


@pytest.mark.parametrize("case", at_a_push(cases(MODELS, (2, 3, 5)), 8), ids=str)
@pytest.mark.parametrize("num_micro", [1, 3])
def test_gradients_are_those_of_the_resident_model(case: Case, num_micro: int) -> None:
    found = errors(world_of(case.sort), case, num_micro)
    assert max(found["all"], found["loss"]) < 1e-6
    assert max(found.values()) < 1e-5, found


CASE = Case(sort="llama", steps=steps_of(3), update="none", head_pieces=3)


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_a_piece_that_is_left_out_would_be_noticed(
    left_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_back = pieces.piece_gradients
    calls = iter(range(99))

    def forget(*args: Any) -> None:
        if next(calls) // 2 != left_out:
            go_back(*args)

    monkeypatch.setattr(pieces, "piece_gradients", forget)
    found = errors(world_of("llama"), CASE, 2)
    assert found["lm_head.weight"] > 1e-2
    assert found["model.layers.0.mlp.up_proj.weight"] > 1e-3


def test_sums_of_some_pieces_alone_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    row_sums = pieces.row_sums

    def half(rows: Tensor, trained: Any, projection: Any, num_pieces: int, **notes: Any) -> Any:
        some = projection.piece(slice(VOCABULARY // 2))
        return row_sums(rows, trained, some, num_pieces, **notes)

    monkeypatch.setattr(pieces, "row_sums", half)
    found = errors(world_of("llama"), CASE, 2)
    assert min(found.values()) > 1e-3


LANES = cases(("llama", "gpt_oss", "llama, head frozen"), (2, 5))


@pytest.mark.few(4)
@pytest.mark.parametrize("case", at_a_push(LANES, 6), ids=str)
def test_lanes_give_the_bits_of_the_reference_in_three_steps(case: Case) -> None:
    world = world_of(case.sort)
    reference = world.play(
        replace(case, grad_slots=2, tape="device", copying=False), reference=True
    )
    assert world.play(case).differences(reference) == []


def test_a_loss_of_log_probabilities_goes_by_pieces_too() -> None:
    world, gradients = world_of("llama"), []
    for head_pieces in (1, 4):
        case = replace(CASE, head_pieces=head_pieces)
        with world.engine(case, loss=Dpo()) as engine:
            loss = engine.step(with_pairs(make_batch(((2, 6), (4, 5)), seed=1))).loss
            engine.settle()
        gradients.append((loss, world.store.param("lm_head.weight", Kind.GRAD).clone()))
    (loss, gradient), (found_loss, found) = gradients
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert (found - gradient).norm() < 1e-6 * gradient.norm()


# Memory.


def memory(head_pieces: int, *, grad_slots: int = 2, gathers: bool = True) -> tuple[int, int]:
    """Return the bytes of all gradient slots, and the peak, on the simulated accelerator."""
    simulator = Simulator(policy="early")
    case = replace(CASE, head_pieces=head_pieces, grad_slots=grad_slots)
    device = Accelerator(simulator)
    with (
        watched(simulator),
        world_of("llama").engine(case, device=device, gather_embedding=gathers) as engine,
    ):
        engine.step(BATCH)
        slots = engine._machine.gradients._sums._slots.buffers.values()
        return sum(buffer.nbytes for buffer in slots), device.peak_bytes


@pytest.mark.merge
@pytest.mark.parametrize("grad_slots", [1, 2])
def test_pieces_no_larger_than_a_layer_cost_no_gradient_memory(grad_slots: int) -> None:
    layout = world_of("llama").store.layout
    embedding, layer, _, whole_head = (
        4 * sum(segment.num_elements for segment in layout.trained_segments(block))
        for block in range(4)
    )
    assert layer < whole_head < 3 * layer
    slots, peak = memory(1, grad_slots=grad_slots)
    assert slots == grad_slots * layer + whole_head
    by_pieces, peak_by_pieces = memory(4, grad_slots=grad_slots)
    assert by_pieces == grad_slots * layer
    assert peak - peak_by_pieces >= slots - by_pieces
    with_table, _ = memory(4, grad_slots=grad_slots, gathers=False)
    assert with_table == grad_slots * layer + embedding


def test_a_piece_larger_than_a_layer_makes_its_slot_larger() -> None:
    layout = world_of("llama").store.layout
    layer = 4 * sum(segment.num_elements for segment in layout.trained_segments(1))
    half, norm = 4 * VOCABULARY // 2 * 32, 4 * 256
    assert layer < half
    assert memory(2)[0] == half + (half + norm)  # with the last piece goes the norm


# Models that cannot.


def test_a_tied_head_is_refused() -> None:
    world = World(Sort(config=lambda: CONFIGS["gemma2"](**SIZES, num_hidden_layers=2)))
    with pytest.raises(ConfigError, match="head_pieces is 2: the head of this model reads the emb"):
        world.engine(Case(sort="", steps=(), update="none", head_pieces=2))


def test_scores_that_need_all_logits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Template, "scores_by_element", False)
    with pytest.raises(
        ConfigError, match="what llama does to its logits needs all of them at once"
    ):
        world_of("llama").engine(CASE)


@pytest.mark.parametrize("head_pieces", [0, VOCABULARY + 1])
def test_more_pieces_than_tokens_are_refused(head_pieces: int) -> None:
    with pytest.raises(ConfigError, match=r"must be between 1 and the 512 tokens"):
        world_of("llama").engine(replace(CASE, head_pieces=head_pieces), device=CpuDevice())
