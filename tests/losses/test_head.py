"""Laws of head.py: the bits of ordinary autograd, in the memory of one chunk."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatrain.losses.head import (
    IGNORED,
    HeadGradients,
    head_gradients,
    head_logprobs,
    next_token_targets,
    trained_rows,
)
from megatrain.losses.projection import Projection
from testkit.live_bytes import LiveBytes

TOKENS, WIDTH, VOCABULARY = 24, 16, 50
BF16, FP32 = torch.bfloat16, torch.float32


def soft_cap(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 3.0) * 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    rows: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    token_weights: Tensor
    scores: Callable[[Tensor], Tensor] | None

    @property
    def projection(self) -> Projection:
        return Projection(weight=self.weight, bias=self.bias, scores=self.scores)


def make(
    dtype: torch.dtype = FP32,
    *,
    bias: bool = False,
    scores: Callable[[Tensor], Tensor] | None = None,
    tokens: int = TOKENS,
    all_trained: bool = False,
) -> World:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    if not all_trained:
        targets[::5] = IGNORED
        targets[8:12] = IGNORED
    return World(
        rows=torch.randn(tokens, WIDTH, generator=generator).to(dtype),
        weight=torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_(),
        bias=torch.randn(VOCABULARY, generator=generator).to(dtype).requires_grad_()
        if bias
        else None,
        targets=targets,
        token_weights=torch.where(targets != IGNORED, -1.0 / int((targets != IGNORED).sum()), 0.0),
        scores=scores,
    )


Found = tuple[Tensor, Tensor, Tensor, Tensor | None]


def by_autograd(world: World, *, all_rows: bool = True) -> Found:
    """Loss and gradients of rows, weight and bias, through all logits at once.

    Or through those of the rows that have a target.
    """
    rows = world.rows.clone().requires_grad_()
    keep = (world.targets >= IGNORED if all_rows else world.targets != IGNORED).nonzero()[:, 0]
    wanted = [rows, world.weight] + ([] if world.bias is None else [world.bias])
    logits = F.linear(rows[keep], world.weight, world.bias)
    logits = (logits if world.scores is None else world.scores(logits)).float()
    losses = F.cross_entropy(logits, world.targets[keep], ignore_index=IGNORED, reduction="none")
    logprobs = torch.zeros(len(rows)).index_copy(0, keep, -losses)
    loss = (logprobs * world.token_weights).sum()
    grads = torch.autograd.grad(loss, wanted)
    return loss.detach(), grads[0], grads[1], grads[2] if world.bias is not None else None


def in_chunks(
    world: World, chunk_tokens: int, count: AbstractContextManager[object] | None = None
) -> Found:
    """The same by head_gradients, the parts of weight and bias added up in fp32."""
    sums: list[Tensor | None] = [None, None]

    def add(first_token: int, *parts: Tensor | None) -> None:
        assert first_token == 0
        for index, part in enumerate(parts):
            if part is not None:
                before = sums[index]
                sums[index] = part.float() if before is None else before + part.float()

    trained = trained_rows(world.targets, chunk_tokens)
    with count or nullcontext():
        result = head_gradients(world.rows, trained, world.token_weights, world.projection, add)
    assert isinstance(result, HeadGradients)
    weight, bias = sums
    assert weight is not None
    return (result.logprobs * world.token_weights).sum(), result.rows, weight, bias


CASES = [
    (dtype, bias, scores)
    for dtype in (FP32, BF16)
    for bias in (False, True)
    for scores in (None, soft_cap)
]


@pytest.mark.parametrize(("dtype", "bias", "scores"), CASES)
@pytest.mark.parametrize("all_trained", [True, False])
def test_one_chunk_gives_the_bits_of_ordinary_autograd(
    dtype: torch.dtype,
    bias: bool,
    scores: Callable[[Tensor], Tensor] | None,
    all_trained: bool,
) -> None:
    world = make(dtype, bias=bias, scores=scores, all_trained=all_trained)
    wanted = by_autograd(world, all_rows=all_trained)
    for chunk_tokens in (TOKENS, TOKENS + 1, 10**6):
        for found, expected in zip(in_chunks(world, chunk_tokens), wanted, strict=True):
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert torch.equal(found, expected.to(found.dtype))


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 7, 23])
@pytest.mark.parametrize(("dtype", "bias", "scores"), CASES)
def test_any_chunking_gives_them_within_rounding(
    dtype: torch.dtype, bias: bool, scores: Callable[[Tensor], Tensor] | None, chunk_tokens: int
) -> None:
    world = make(dtype, bias=bias, scores=scores)
    close = 1e-6 if dtype is FP32 else 2.0**-7
    for found, expected in zip(in_chunks(world, chunk_tokens), by_autograd(world), strict=True):
        if found is not None and expected is not None:
            largest = float(expected.abs().max())
            torch.testing.assert_close(
                found.float(), expected.float(), rtol=close, atol=close * largest
            )


def test_a_chunk_left_out_would_be_noticed() -> None:
    world = make()
    short = World(
        rows=world.rows,
        weight=world.weight,
        bias=None,
        targets=torch.cat([world.targets[:20], torch.full((4,), IGNORED)]),
        token_weights=world.token_weights,
        scores=None,
    )
    for found, expected in zip(in_chunks(short, 4), by_autograd(world), strict=True):
        if found is not None and expected is not None:
            assert not torch.allclose(found, expected, rtol=1e-4)


def test_a_row_without_a_target_costs_nothing() -> None:
    seen: list[int] = []

    def counting(logits: Tensor) -> Tensor:
        seen.append(len(logits))
        return logits

    world = make(scores=counting)
    _, rows, _, _ = in_chunks(world, 4)
    trained = world.targets != IGNORED
    assert int(trained.sum()) == 16
    assert seen == [4] * 4  # of 6
    assert not rows[~trained].any()
    assert rows[trained].any(1).all()
    seen.clear()
    head_logprobs(world.rows, trained_rows(world.targets, 4), world.projection)
    assert seen == [4] * 4


def test_a_micro_batch_without_any_target_gives_zero() -> None:
    world = make()
    nothing = torch.full_like(world.targets, IGNORED)
    result = head_gradients(
        world.rows,
        trained_rows(nothing),
        torch.zeros(TOKENS),
        world.projection,
        lambda first, weight, bias: pytest.fail("there is no gradient to take"),
    )
    assert not result.logprobs.any()
    assert not result.rows.any()


def test_a_frozen_projection_gets_no_gradient_but_passes_one_on() -> None:
    world = make(bias=True)
    _, expected, _, d_bias = by_autograd(world, all_rows=False)
    given: list[tuple[Tensor | None, Tensor | None]] = []
    result = head_gradients(
        world.rows,
        trained_rows(world.targets),
        world.token_weights,
        Projection(weight=world.weight.detach(), bias=world.bias),
        lambda first, d_weight, d_bias: given.append((d_weight, d_bias)),
    )
    assert torch.equal(result.rows, expected)
    ((d_weight, found_d_bias),) = given
    assert d_weight is None
    assert found_d_bias is not None
    assert d_bias is not None
    assert torch.equal(found_d_bias, d_bias)


@pytest.mark.parametrize("chunk_tokens", [1, 5, TOKENS])
def test_logprobs_are_those_of_the_targets_and_zero_elsewhere(chunk_tokens: int) -> None:
    world = make(bias=True, scores=soft_cap)
    found = head_logprobs(world.rows, trained_rows(world.targets, chunk_tokens), world.projection)
    assert (found.dtype, found.requires_grad) == (FP32, False)
    logits = soft_cap(F.linear(world.rows, world.weight, world.bias)).detach()
    all_logprobs = logits.log_softmax(-1)
    for token, target in enumerate(world.targets.tolist()):
        expected = 0.0 if target == IGNORED else float(all_logprobs[token, target])
        assert float(found[token]) == pytest.approx(expected, rel=1e-5)


def test_logprobs_are_taken_in_fp32() -> None:
    world = make(BF16)
    trained = world.targets != IGNORED
    logits = F.linear(world.rows, world.weight)[trained].float()
    expected = -F.cross_entropy(logits, world.targets[trained], reduction="none")
    found = head_logprobs(world.rows, trained_rows(world.targets), world.projection)
    assert torch.equal(found[trained], expected)


def test_targets_are_the_next_labels_and_never_cross_rows() -> None:
    labels = torch.tensor([[1, 2, 3], [IGNORED, 5, IGNORED]])
    assert next_token_targets(labels).tolist() == [2, 3, IGNORED, 5, IGNORED, IGNORED]


# Memory.


def peak_beyond_the_rows(tokens: int, chunk_tokens: int) -> int:
    """Peak of what is made, less the result: log-probabilities and the gradient of the rows."""
    world = make(tokens=tokens, all_trained=True)
    count = LiveBytes()
    in_chunks(world, chunk_tokens, count)
    return int(count.peak - world.rows.nbytes - 4 * tokens)


def test_peak_memory_is_that_of_one_chunk_whatever_the_batch() -> None:
    chunk = 256
    small, large = (peak_beyond_the_rows(chunk * number, chunk) for number in (2, 16))
    assert large == pytest.approx(small, rel=0.02)
    logits_bytes = 4 * chunk * VOCABULARY
    assert large < 6 * logits_bytes  # logits, log-probabilities, their gradients


# One loss for a step, however it is cut.


@pytest.mark.parametrize("cuts", [(12,), (1, 2), (4, 9, 13), tuple(range(1, TOKENS))])
def test_micro_batches_of_any_length_add_up_to_one_batch(cuts: tuple[int, ...]) -> None:
    world = make()
    whole = by_autograd(world)
    bounds = [0, *cuts, TOKENS]
    parts = [
        in_chunks(
            World(
                rows=world.rows[start:stop],
                weight=world.weight,
                bias=None,
                targets=world.targets[start:stop],
                token_weights=world.token_weights[start:stop],
                scores=None,
            ),
            chunk_tokens=10**6,
        )
        for start, stop in pairwise(bounds)
        if (world.targets[start:stop] != IGNORED).any()
    ]
    assert float(sum(part[0] for part in parts)) == pytest.approx(float(whole[0]), rel=1e-6)
    total = torch.stack([part[2] for part in parts]).sum(0)
    torch.testing.assert_close(total, whole[2], rtol=0, atol=1e-6)
