"""The loss is a seam: preferences between pairs of answers train as under ordinary autograd.

Three chained steps against the resident model: one micro-batch, two unequal ones with padding, one
with two answers packed into each row. Losses, gradients (where they wait for the clip factor) and
weights are compared bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from megatrain import load_model
from megatrain.batch import MicroBatch
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.device import CpuDevice
from megatrain.engine.engine import Engine
from megatrain.engine.results import StepResult
from megatrain.errors import BatchError
from megatrain.losses.loss import NEXT_TOKEN, LogprobGrads, Loss, LossInputs, LossValue
from megatrain.losses.preferences import Dpo
from megatrain.memory.kinds import TensorKind
from megatrain.optim.adamw import AdamW
from megatrain.optim.optimizer import decays
from testkit.engines import make_engine
from testkit.families import save_tiny
from testkit.live_bytes import LiveBytes
from testkit.pair_loss import plain_pair_loss, with_pairs
from testkit.plain import load_plain, make_batch, plain_gradients, plain_logprobs
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import WatchedOptimizer, watched
from testkit.worlds import Case, Outcome, dawdling_lanes, world_of
from testkit.worlds import make_batch as small_batch
from tests.engine.test_engine_memory import Apart
from tests.engine.test_exactness import (
    DECAY,
    DTYPES,
    RATE,
    PlainTraining,
    differing,
    rounded,
)

BATCHES = [
    with_pairs(make_batch([(4, 16)], seed=1), seed=1),
    with_pairs(make_batch([(2, 24), (6, 9)], seed=2, padded=True), seed=4),
    with_pairs(make_batch([(3, 24)], seed=3, packed=True), seed=3),
]
FAMILIES = [
    ("llama", "fp32"),
    ("llama", "bf16"),
    ("gemma2", "bf16"),  # soft-capped logits, tied
    ("gpt2", "fp32"),  # tied
    ("mixtral", "bf16"),
]
PLAYS: list[tuple[Literal["late", "in_backward"], bool]] = [
    ("late", False),
    ("late", True),
    ("in_backward", False),
    ("in_backward", True),
]


def differences(
    folder: Path,
    family: str,
    dtype: Literal["fp32", "bf16"],
    loss: Loss,
    update: Literal["late", "in_backward"] = "late",
    **settings: Any,
) -> list[str]:
    """Return what differs from the resident model after each of three steps, and at the end."""
    save_tiny(folder, family, DTYPES[dtype])
    model = load_model(folder, dtype=dtype)
    store, params = model.store, model.decoder.params
    plain = PlainTraining(load_plain(folder, DTYPES[dtype]), {p.name: decays(p) for p in params})
    optimizer = AdamW(learning_rate=RATE, weight_decay=DECAY)
    found: list[str] = []
    with make_engine(
        model.decoder, store, optimizer=optimizer, update=update, loss=loss, **settings
    ) as engine:
        for number, batch in enumerate(BATCHES):
            losses, gradients = plain_gradients(plain.model, batch, loss_of=plain_pair_loss(batch))
            result = engine.step(batch)
            if list(result.micro_losses) != losses:
                found.append(f"losses of step {number}")
            if update == "late":
                ours = {p.name: store.param(p.name, TensorKind.GRAD) for p in params}
                found += [f"{n} of step {number}" for n in differing(gradients, ours)]
            plain.update(gradients)
        engine.synchronize()
    flat = {p.name: store.param(p.name, TensorKind.HI).reshape(-1) for p in params}
    expected = {n: rounded(s.weight, flat[n].dtype) for n, s in plain.states.items()}
    return found + differing(expected, flat)


@pytest.mark.few(4)
@pytest.mark.parametrize(("update", "reference"), PLAYS)
@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_three_steps_equal_the_resident_model(
    family: str, dtype: Any, update: Any, reference: bool, tmp_path: Path
) -> None:
    device = CpuDevice(copying=not reference)
    assert (
        differences(tmp_path, family, dtype, Dpo(), update, reference=reference, device=device)
        == []
    )


class Swapped(Dpo):
    """Prefers the rejected answers."""

    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        return super().of_answers(inputs, sums.view(-1, 2).flip(1).reshape(-1))


class Unreferenced(Dpo):
    """Forgets the reference."""

    def of_answers(self, inputs: LossInputs, sums: Tensor) -> LossValue:
        extra = {
            **inputs.loss_tensors,
            "reference": torch.zeros_like(inputs.loss_tensors["reference"]),
        }
        return super().of_answers(replace(inputs, loss_tensors=extra), sums)


class Stale(Dpo):
    """Takes the weights from the log-probabilities of the micro-batch before, if they fit."""

    seen: ClassVar[list[Tensor]] = []

    def logprob_grads(
        self, inputs: LossInputs, logprobs: Tensor | None, num_items: int
    ) -> LogprobGrads:
        assert logprobs is not None
        fitting = [seen for seen in self.seen[-1:] if seen.shape == logprobs.shape]
        self.seen.append(logprobs)
        return super().logprob_grads(inputs, (fitting or [logprobs * 0])[0], num_items)


class PerMicroBatch(Dpo):
    """Divides by the pairs of the micro-batch, not of the step."""

    def logprob_grads(
        self, inputs: LossInputs, logprobs: Tensor | None, num_items: int
    ) -> LogprobGrads:
        return super().logprob_grads(inputs, logprobs, self.num_items(inputs))


@pytest.mark.parametrize("loss", [Swapped(), Unreferenced(), Stale(), PerMicroBatch(), NEXT_TOKEN])
def test_a_wrong_loss_would_be_noticed(
    loss: Loss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(NEXT_TOKEN), "required_tensors", Dpo.required_tensors)
    found = differences(tmp_path, "llama", "fp32", loss)
    step = 1 if isinstance(loss, PerMicroBatch) else 0  # the first step has one micro-batch
    assert {f"losses of step {step}", f"model.norm.weight of step {step}"} <= set(found)


# However the work is cut.


def gradients_of(batch: list[MicroBatch], **settings: Any) -> tuple[StepResult, dict[str, Tensor]]:
    world = world_of("llama in fp32")
    case = Case(sort="", steps=(), update="none")
    with world.engine(case, loss=Dpo(), **settings) as engine:
        result = engine.step(batch)
    return result, {
        p.name: world.store.param(p.name, TensorKind.GRAD) + 0 for p in world.decoder.params
    }


def cut(micro: MicroBatch, rows: slice) -> MicroBatch:
    """Return some rows with the answers in them."""
    taken = replace(micro, input_ids=micro.input_ids[rows], labels=micro.labels[rows])
    extra = {name: tensor[rows] for name, tensor in micro.loss_tensors.items()}
    return replace(
        taken, loss_tensors=extra | {"answers": extra["answers"] - extra["answers"].min()}
    )


@pytest.mark.parametrize(("chunk_tokens", "cuts"), [(5, (0, 8)), (4096, (0, 2, 8)), (7, (0, 6, 8))])
def test_chunks_and_micro_batches_change_rounding_alone(
    chunk_tokens: int, cuts: tuple[int, ...]
) -> None:
    (whole,) = with_pairs(small_batch(((8, 6),), seed=0))
    expected, gradients = gradients_of([whole])
    parts = [cut(whole, slice(a, b)) for a, b in pairwise(cuts)]
    result, found = gradients_of(parts, chunk_tokens=chunk_tokens)
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-5, abs=1e-5)
    for name, gradient in gradients.items():
        largest = float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * largest)


def outcome(update: Any, **changes: Any) -> Outcome:
    """Return what two steps and an evaluation give in bf16, with a tied head and dropout."""
    world = world_of("gpt2, tied, with dropout")
    case = Case(sort="", steps=(), update=update, tape="host")
    found = Outcome()
    with world.engine(case, loss=Dpo(), **changes) as engine:
        for seed in range(2):
            batch = with_pairs(small_batch(((2, 6), (4, 5)), seed=seed), seed=seed)
            result = engine.step(batch)
            found.numbers += [*result.micro_losses, result.grad_norm, *result.metrics.values()]
        found.numbers += [*engine.evaluate(batch), *engine.metrics.values()]
    found.states = world.bytes_of(TensorKind.HI, TensorKind.LO)
    return found


@pytest.mark.parametrize("update", ["late", "in_backward"])
def test_lanes_give_the_bits_of_the_reference(update: Any) -> None:
    expected = outcome(update, reference=True)
    for timing in range(3):
        assert outcome(update, lanes=dawdling_lanes(timing)).differences(expected) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["late", "random"])
def test_an_accelerator_gives_them_too_without_a_race_or_a_wait(policy: Any) -> None:
    world = world_of("llama of 2 layers")
    case = Case(sort="", steps=(), update="late", tape="host")
    batches = [with_pairs(small_batch(((2, 6), (4, 5)), seed=s), seed=s) for s in range(3)]
    with world.engine(case, loss=Dpo(), reference=True) as engine:
        expected = [engine.step(batch) for batch in batches]
    weights = world.bytes_of(TensorKind.HI, TensorKind.LO)
    simulator = Simulator(1, policy)
    optimizer = WatchedOptimizer(world.optimizer(), simulator)
    with (
        watched(simulator),
        world.engine(
            case, loss=Dpo(), device=AcceleratorDevice(simulator), optimizer=optimizer
        ) as engine,
    ):
        found = [engine.step(batches[0])]
        before = simulator.num_syncs
        found += [engine.step(batch) for batch in batches[1:]]
        assert simulator.num_syncs == before
    assert found == expected
    assert (
        Outcome(states=world.bytes_of(TensorKind.HI, TensorKind.LO)).differences(
            Outcome(states=weights)
        )
        == []
    )
    assert (simulator.races, simulator.failures) == ([], [])


# Evaluation.


def test_an_evaluation_reports_pairs(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", torch.float32)
    model, plain = load_model(tmp_path, dtype="fp32"), load_plain(tmp_path, torch.float32)
    batch = BATCHES[1]
    loss = plain_pair_loss(batch)
    with torch.no_grad():
        parts = [loss(plain_logprobs(plain, micro).double(), micro) for micro in batch]
    with Engine(model.decoder, model.store, loss=Dpo()) as engine:
        total, num_pairs = engine.evaluate(batch)
        stepped = engine.step(batch)
    assert num_pairs == 4
    assert total / num_pairs == pytest.approx(float(sum(parts)), rel=1e-12)
    assert stepped.loss == pytest.approx(total / num_pairs, rel=1e-5)
    accuracies = [found["rewards/accuracies"] for found in (engine.metrics, stepped.metrics)]
    assert accuracies == [0.75, 0.75]
    assert {*engine.metrics} == {*stepped.metrics}


# What is refused.


def spoilt(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> list[MicroBatch]:
    first, second = with_pairs(small_batch(((2, 6), (6, 5)), seed=0))
    return [first, replace(second, loss_tensors=change(dict(second.loss_tensors)))]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            spoilt(lambda extra: {name: extra[name] for name in ("answers", "lengths")}),
            "micro-batch 1: loss_tensors has no 'reference', and the loss Dpo needs it",
        ),
        (
            spoilt(lambda extra: extra | {"answers": extra["answers"].clamp(max=4)}),
            "micro-batch 1: row 2 has no rejected answer here; both of its answers must be in one "
            "micro-batch",
        ),
        (
            spoilt(lambda extra: extra | {"lengths": extra["lengths"][:5]}),
            "micro-batch 1: answer 5 is not among the 5 of the micro-batch",
        ),
        (
            spoilt(lambda extra: extra | {"lengths": extra["lengths"] + 1}),
            "micro-batch 1: answer 0 has 3 trained tokens, and its length is 4",
        ),
        (
            spoilt(lambda extra: extra | {"reference": extra["reference"][:4]}),
            r"micro-batch 1: 'reference' is \(4,\), and there are 6 to describe",
        ),
        (
            small_batch(((2, 6),), seed=0),
            "micro-batch 0: loss_tensors has no 'answers', and the loss .*",
        ),
    ],
)
def test_pairs_that_are_not_complete_are_refused(batch: list[MicroBatch], message: str) -> None:
    world = world_of("llama in fp32")
    with (
        world.engine(Case(sort="", steps=(), update="none"), loss=Dpo()) as engine,
        pytest.raises(BatchError, match=f"^{message}$"),
    ):
        engine.step(batch)


def test_a_gradient_that_is_not_finite_names_the_micro_batch() -> None:
    good = with_pairs(small_batch(((2, 6), (4, 5)), seed=0))
    bad = replace(
        good[1], loss_tensors={**good[1].loss_tensors, "reference": torch.full((4,), math.nan)}
    )
    world = world_of("llama in fp32")
    with world.engine(Case(sort="", steps=(), update="late"), loss=Dpo()) as engine:
        result = engine.step([good[0], bad])
        assert result.nonfinite is not None
        assert (result.nonfinite.micro, result.nonfinite.documents, result.applied) == (
            1,
            (),
            False,
        )
        assert engine.step(good).nonfinite is None


# Memory.


def peak_bytes(loss: Loss, shape: tuple[int, int] = (8, 32), chunk_tokens: int = 64) -> int:
    """Return the peak of a step, by a count of every tensor that torch makes."""
    world = world_of("llama of 2 layers")
    batch = small_batch((shape,), seed=0)
    batch = with_pairs(batch) if isinstance(loss, Dpo) else batch
    case = Case(sort="", steps=(), update="late", tape="host")
    settings = {"loss": loss, "chunk_tokens": chunk_tokens, "reference": True}
    count = LiveBytes()
    with world.engine(case, device=Apart(copying=True), **settings) as engine, count:
        engine.step(batch)
    return count.peak


def test_a_first_pass_adds_a_few_numbers_per_token_to_the_peak() -> None:
    num_tokens = 8 * 32
    added = peak_bytes(Dpo()) - peak_bytes(NEXT_TOKEN)
    assert added <= 3 * 4 * num_tokens
