"""Preference losses against their formulas, one row at a time in plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatrain.errors import BatchError
from megatrain.losses import preferences
from megatrain.losses.loss import LossInputs
from megatrain.losses.preferences import (
    AnswerLoss,
    ApoZero,
    Dpo,
    Ipo,
    Kto,
    Orpo,
    Robust,
    Simpo,
    answer_sums,
)

LENGTHS = (3, 5, 1, 2, 4, 4)
"""Trained tokens of each document: three rows."""
LOSSES: list[AnswerLoss] = [
    Dpo(),
    Dpo(beta=0.5, label_smoothing=0.2),
    Dpo(sft=0.7),
    Robust(beta=0.4, label_smoothing=0.2),
    ApoZero(beta=0.6),
    ApoZero(sft=1.5),
    Ipo(beta=0.3),
    Ipo(sft=0.2),
    Orpo(beta=0.7),
    Simpo(),
    Simpo(beta=1.5, gamma=0.4, label_smoothing=0.1),
    Kto(beta=0.4, desirable_weight=1.3, undesirable_weight=0.6),
]


def made(loss: AnswerLoss, lengths: tuple[int, ...] = LENGTHS) -> tuple[LossInputs, Tensor]:
    """Return documents in a packed row, each after a token that is not trained, and log-probs."""
    generator = torch.Generator().manual_seed(len(lengths))
    numbers, targets = [], []
    for number, length in enumerate(lengths):
        numbers += [number] * (length + 1)
        targets += [-100] + [7] * length
    answers, wanted = torch.tensor([numbers]), torch.tensor([targets])
    logprobs = -3 * torch.rand(wanted.shape, generator=generator)
    extra = {
        "answers": answers,
        "lengths": torch.tensor(lengths),
        "reference": -5 * torch.rand(len(lengths), generator=generator),
        "desirable": torch.tensor([True, False, True])[: len(lengths) // 2],
    }
    needed = {name: extra[name] for name in loss.required_tensors}
    return LossInputs(targets=wanted, loss_tensors=needed), logprobs.where(wanted != -100, 0.0)


def log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value))


def by_hand(loss: AnswerLoss, inputs: LossInputs, logprobs: Tensor) -> float:
    """Return the loss by its formula, row by row, in double precision."""
    lengths = inputs.loss_tensors["lengths"].tolist()
    flat, numbers = logprobs.double().view(-1), inputs.loss_tensors["answers"].view(-1)
    sums = [float(flat[numbers == number].sum()) for number in range(len(lengths))]
    references = inputs.loss_tensors.get("reference", torch.zeros(len(sums))).double().tolist()
    ratios = [a - b for a, b in zip(sums, references, strict=True)]
    drift = max(0.0, sum(ratios[1::2]) / len(ratios[1::2]))
    total = 0.0
    for row in range(len(sums) // 2):
        first, second = 2 * row, 2 * row + 1
        mean_first, mean_second = (sums[n] / lengths[n] for n in (first, second))
        total -= getattr(loss, "sft", 0.0) * mean_first
        if isinstance(loss, Robust):
            margin, wrong = loss.beta * (ratios[first] - ratios[second]), loss.label_smoothing
            right = (1 - wrong) * log_sigmoid(margin) - wrong * log_sigmoid(-margin)
            total -= right / (1 - 2 * wrong)
        elif isinstance(loss, ApoZero):
            total += 1 - math.exp(log_sigmoid(loss.beta * ratios[first]))
            total += math.exp(log_sigmoid(loss.beta * ratios[second]))
        elif isinstance(loss, Dpo):
            margin = loss.beta * (ratios[first] - ratios[second])
            total -= (1 - loss.label_smoothing) * log_sigmoid(margin)
            total -= loss.label_smoothing * log_sigmoid(-margin)
        elif isinstance(loss, Ipo):
            gap = ratios[first] / lengths[first] - ratios[second] / lengths[second]
            total += (gap - 1 / (2 * loss.beta)) ** 2
        elif isinstance(loss, Orpo):
            odds = [math.exp(m) / (1 - math.exp(m)) for m in (mean_first, mean_second)]
            total -= mean_first + loss.beta * log_sigmoid(math.log(odds[0] / odds[1]))
        elif isinstance(loss, Simpo):
            margin = loss.beta * (mean_first - mean_second) - loss.gamma
            total -= (1 - loss.label_smoothing) * log_sigmoid(margin)
            total -= loss.label_smoothing * log_sigmoid(-margin)
        else:
            assert isinstance(loss, Kto)
            good = bool(inputs.loss_tensors["desirable"][row])
            gain = (ratios[first] - drift) * (1 if good else -1)
            weight = loss.desirable_weight if good else loss.undesirable_weight
            total += weight * (1 - 1 / (1 + math.exp(-loss.beta * gain)))
    return total


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_each_is_its_formula(loss: AnswerLoss) -> None:
    inputs, logprobs = made(loss)
    assert loss.num_items(inputs) == 3
    found = loss.compute_loss(inputs, logprobs.double())
    assert float(found.loss_sum) == pytest.approx(by_hand(loss, inputs, logprobs), rel=1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_weights_are_the_gradients_of_ordinary_autograd(loss: AnswerLoss) -> None:
    inputs, logprobs = made(loss)
    leaf = logprobs.clone().requires_grad_()
    value = loss.compute_loss(inputs, leaf).loss_sum / 5
    (expected,) = torch.autograd.grad(value, leaf)
    found = loss.logprob_grads(inputs, logprobs, 5)
    torch.testing.assert_close(found.logprob_grads, expected, rtol=1e-6, atol=0)
    assert found.loss is not None
    assert float(found.loss) == pytest.approx(float(value.detach()), rel=1e-6)
    assert float(expected.abs().max()) > 1e-3


@pytest.mark.parametrize("loss", LOSSES[:-1], ids=repr)
def test_micro_batches_add_up_to_the_step(loss: AnswerLoss) -> None:
    inputs, logprobs = made(loss)
    parts = []
    for row in range(3):
        kept = (inputs.loss_tensors["answers"][0] // 2 == row).nonzero().view(-1)
        extra = {
            name: inputs.loss_tensors[name][2 * row : 2 * row + 2]
            for name in loss.required_tensors[1:]
        }
        extra["answers"] = inputs.loss_tensors["answers"][:, kept] - 2 * row
        part = LossInputs(targets=inputs.targets[:, kept], loss_tensors=extra)
        parts.append(float(loss.compute_loss(part, logprobs[:, kept]).loss_sum))
    assert sum(parts) == pytest.approx(
        float(loss.compute_loss(inputs, logprobs).loss_sum), rel=1e-5
    )


def test_at_its_own_reference_nothing_is_preferred() -> None:
    inputs, logprobs = made(Dpo())
    own = {**inputs.loss_tensors, "reference": answer_sums(inputs, logprobs)}
    found = Dpo().compute_loss(replace(inputs, loss_tensors=own), logprobs)
    assert float(found.loss_sum) == pytest.approx(3 * math.log(2), rel=1e-6)
    figures = [float(found.metrics[f"rewards/{n}"]) for n in ("chosen", "rejected", "accuracies")]
    assert figures == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("mean", [-1e-6, -0.5, -0.69, -0.7, -40.0])
def test_odds_are_exact_near_certainty_and_far_from_it(mean: float) -> None:
    inputs, _ = made(Orpo(), (1, 1))
    logprobs = torch.tensor([[0.0, mean, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    total = Orpo(beta=1.0).compute_loss(inputs, logprobs).loss_sum
    gap = mean - math.log(-math.expm1(mean)) + 1.0 + math.log(-math.expm1(-1.0))
    assert float(total.detach()) == pytest.approx(-mean - log_sigmoid(gap), rel=1e-9)
    (gradient,) = torch.autograd.grad(total, logprobs)
    assert bool(gradient.isfinite().all())


def test_unrelated_answers_are_not_trained_and_rewards_are_of_their_kind() -> None:
    loss = Kto()
    inputs, logprobs = made(loss)
    found = loss.logprob_grads(inputs, logprobs, 3)
    of_document = found.logprob_grads[0][inputs.loss_tensors["answers"][0] % 2 == 1]
    assert bool((of_document == 0).all())
    ratios = (answer_sums(inputs, logprobs) - inputs.loss_tensors["reference"])[::2] * loss.beta
    means = {name: float(figure) / 3 for name, figure in found.metrics.items()}
    reported = loss.reported(means)
    chosen, rejected = float(ratios[[0, 2]].mean()), float(ratios[1])
    assert reported["rewards/chosen"] == pytest.approx(chosen, rel=1e-5)
    assert reported["rewards/rejected"] == pytest.approx(rejected, rel=1e-5)
    assert reported["rewards/margins"] == pytest.approx(chosen - rejected, rel=1e-5)
    assert "rewards/rejected" not in loss.reported(means | {"desirable": 1.0})


def test_sums_by_blocks_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, logprobs = made(Dpo())
    expected = answer_sums(inputs, logprobs)
    monkeypatch.setattr(preferences, "_BLOCK_ELEMENTS", 1)
    assert torch.equal(answer_sums(inputs, logprobs), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e | {"answers": e["answers"] + 1}, "answer 6 is not among the 6"),
        (lambda e: e | {"answers": e["answers"].clamp(max=4)}, "row 2 has no unrelated answer"),
        (lambda e: e | {"desirable": e["desirable"][:2]}, r"'desirable' is \(2,\)"),
    ],
)
def test_incomplete_rows_are_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    inputs, _ = made(Kto())
    with pytest.raises(BatchError, match=message):
        Kto().num_items(replace(inputs, loss_tensors=change(dict(inputs.loss_tensors))))
