"""Laws of pieces.py: any number of pieces gives the gradients of ordinary autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatrain.losses import leaves, pieces
from megatrain.losses.head import head_logprobs, trained_rows
from megatrain.losses.pieces import piece_gradients, row_sums
from megatrain.step.settings import vocabulary_pieces
from testkit.live_bytes import LiveBytes
from tests.losses.test_head import BF16, CASES, FP32, VOCABULARY, World, by_autograd, make

CLOSE = {FP32: 1e-6, BF16: 2.0**-7}
"""Of the norm."""


def in_pieces(world: World, num_pieces: int, chunk_tokens: int = 10**6) -> list[Tensor]:
    """Return loss and gradients of rows, weight and bias (if any), by pieces."""
    trained = trained_rows(world.targets, chunk_tokens)
    projection = replace(world.projection, part_elements=4 * VOCABULARY)
    sums = row_sums(world.rows, trained, projection, num_pieces)
    d_rows = torch.zeros_like(world.rows, dtype=FP32)
    d_weight, d_bias = torch.zeros(world.weight.shape), torch.zeros(VOCABULARY)
    for tokens in vocabulary_pieces(VOCABULARY, num_pieces):

        def add(first: int, weight: Tensor | None, bias: Tensor | None, of: slice = tokens) -> None:
            assert weight is not None
            rows = slice(of.start + first, of.start + first + len(weight))
            d_weight[rows] += weight
            if bias is not None:
                d_bias[rows] += bias

        piece = projection.piece(tokens)
        log_sums, weights = sums.log_sums, world.token_weights
        piece_gradients(world.rows, trained, weights, log_sums, piece, tokens.start, d_rows, add)
    found = [(sums.logprobs * world.token_weights).sum(), d_rows, d_weight]
    return found if world.bias is None else [*found, d_bias]


def distance(found: Tensor, expected: Tensor) -> float:
    """Return how far apart they are, relative to the norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def distances(world: World, num_pieces: int, chunk_tokens: int = 10**6) -> list[float]:
    expected = [tensor for tensor in by_autograd(world) if tensor is not None]
    found = in_pieces(world, num_pieces, chunk_tokens)
    return [distance(one, other) for one, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize(
    ("num_pieces", "chunk_tokens"), [(1, 99), (2, 99), (3, 5), (7, 99), (50, 7)]
)
@pytest.mark.parametrize(("dtype", "bias", "scores"), CASES)
def test_any_number_of_pieces_gives_the_gradients_of_ordinary_autograd(
    dtype: torch.dtype,
    bias: bool,
    scores: Callable[[Tensor], Tensor] | None,
    num_pieces: int,
    chunk_tokens: int,
) -> None:
    world = make(dtype, bias=bias, scores=scores)
    assert max(distances(world, num_pieces, chunk_tokens)) < CLOSE[dtype]


def test_far_scores_do_not_overflow() -> None:
    world = make()
    far = replace(world, weight=(world.weight.detach() * 1e3).requires_grad_())
    assert max(distances(far, 3)) < 1e-6


def test_scores_that_need_the_whole_row_would_be_noticed() -> None:
    world = make(scores=lambda logits: logits - 2 * logits.mean(1, keepdim=True) * logits)
    assert max(distances(world, 3)) > 1e-2


def test_a_piece_without_the_sums_of_the_others_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "logaddexp", lambda before, sums: sums)
    assert max(distances(make(), 2)) > 1e-2


def test_a_target_looked_for_in_the_wrong_piece_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = leaves.places_in

    def everywhere(targets: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        place, inside = real(targets, num_tokens)
        return place, torch.ones_like(inside)

    monkeypatch.setattr(pieces, "places_in", everywhere)
    assert max(distances(make(), 2)) > 1e-2


def test_the_same_call_gives_the_same_bits() -> None:
    world = make(bias=True)
    for one, other in zip(in_pieces(world, 3, 5), in_pieces(world, 3, 5), strict=True):
        assert torch.equal(one, other)


def test_logprobs_are_those_of_the_whole_vocabulary() -> None:
    world = make()
    trained = trained_rows(world.targets)
    expected = head_logprobs(world.rows, trained, world.projection)
    found = row_sums(world.rows, trained, world.projection, 3)
    assert distance(found.logprobs, expected) < 1e-6
    assert not found.log_sums[world.targets < 0].any()


def peak(num_pieces: int) -> int:
    world = make(BF16, tokens=256)
    with LiveBytes() as count:
        row_sums(world.rows, trained_rows(world.targets), world.projection, num_pieces)
    return int(count.peak)


def test_the_first_pass_holds_the_logits_of_one_piece() -> None:
    logits = 256 * VOCABULARY * 2
    assert peak(1) - peak(5) > logits / 2


# The cut.


@pytest.mark.parametrize("num_tokens", [5, 50, 320, 32000, 151936, 50257])
@pytest.mark.parametrize("num_pieces", [1, 2, 3, 5])
def test_a_vocabulary_is_cut_into_pieces_in_order(num_tokens: int, num_pieces: int) -> None:
    found = vocabulary_pieces(num_tokens, num_pieces)
    assert len(found) == num_pieces
    assert [token for piece in found for token in range(num_tokens)[piece]] == list(
        range(num_tokens)
    )
    sizes = [piece.stop - piece.start for piece in found]
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) < 16
    if num_tokens >= 320:
        assert all(piece.start % 8 == 0 for piece in found)
