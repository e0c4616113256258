"""Distillation: divergences over the vocabulary, or over a teacher's likeliest tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.choices import Divergence
from megatrain.errors import BatchError
from megatrain.losses.distillation import Distill
from megatrain.losses.head import IGNORED
from megatrain.losses.leaves import TokenOutputs
from megatrain.losses.loss import LossInputs

VOCABULARY = 50
DIVERGENCES: list[Divergence] = ["forward", "reverse", "jsd"]
TARGETS = torch.tensor([[3, IGNORED, 7, 1], [IGNORED, 2, 4, IGNORED]])


def drawn(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*TARGETS.shape, VOCABULARY, generator=generator)


def inputs_of(teacher: Tensor, student: Tensor, top_k: int) -> LossInputs:
    """Return what the loss sees: leaves are zero where there is no target."""
    trained = TARGETS != IGNORED
    found = teacher.log_softmax(-1).topk(top_k)
    logits = student.gather(-1, found.indices).where(trained[..., None], 0.0)
    leaves = TokenOutputs(
        logprobs=torch.zeros(TARGETS.shape),
        logits=logits,
        tokens=found.indices,
        logsumexp=student.logsumexp(-1).where(trained, 0.0),
    )
    extra = {"teacher_tokens": found.indices, "teacher_logprobs": found.values}
    return LossInputs(targets=TARGETS, loss_tensors=extra, outputs=leaves)


def total(divergence: Divergence, teacher: Tensor, student: Tensor, top_k: int) -> Tensor:
    inputs = inputs_of(teacher, student, top_k)
    value = Distill(divergence=divergence).compute_loss(inputs, torch.zeros(TARGETS.shape))
    assert value.per_item is not None
    assert torch.isclose(value.per_item.sum(), value.loss_sum)
    return value.loss_sum


def by_torch(divergence: Divergence, teacher: Tensor, student: Tensor) -> Tensor:
    """Return the same by torch's own function, over all logits."""
    t, s = (logits.log_softmax(-1)[TARGETS != IGNORED] for logits in (teacher, student))
    mean = (t.exp() + s.exp()).div(2).log()

    def kl(of: Tensor, to: Tensor) -> Tensor:
        return F.kl_div(to, of, reduction="sum", log_target=True)

    both = {"forward": kl(t, s), "reverse": kl(s, t), "jsd": (kl(t, mean) + kl(s, mean)) / 2}
    return both[divergence]


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_over_all_of_the_vocabulary_it_is_the_divergence(divergence: Divergence) -> None:
    teacher, ours, theirs = drawn(0), drawn(1).requires_grad_(), drawn(1).requires_grad_()
    found = total(divergence, teacher, ours, VOCABULARY)
    expected = by_torch(divergence, teacher, theirs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    found.backward()  # type: ignore[no-untyped-call]
    expected.backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    other = by_torch(divergence, teacher, 1.01 * theirs)
    assert abs(other - expected) > 1e-4 * expected, "it would be noticed"


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_fewer_tokens_never_make_it_larger(divergence: Divergence) -> None:
    teacher, student = drawn(0), drawn(1)
    found = [float(total(divergence, teacher, student, k)) for k in (1, 4, 16, VOCABULARY)]
    assert found == sorted(found)
    assert found[0] > 0
    for k in (1, 16, VOCABULARY):
        assert abs(float(total(divergence, teacher, teacher, k))) < 1e-6


def test_scores_of_other_positions_are_refused() -> None:
    inputs = inputs_of(drawn(0), drawn(1), 4)
    scores = {name: tensor[:, :2] for name, tensor in inputs.loss_tensors.items()}
    with pytest.raises(BatchError, match=r"^teacher_tokens is \(2, 2, 4\) and teacher_logprobs .*"):
        Distill().num_items(LossInputs(targets=TARGETS, loss_tensors=scores))
    assert Distill().num_items(inputs) == 5
