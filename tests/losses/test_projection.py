"""Laws of projection.py: parts and cuts change no bit, and no second table exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatrain.losses.head import head_gradients, head_logprobs, trained_rows
from megatrain.losses.projection import Projection
from testkit.live_bytes import LiveBytes
from tests.losses.test_head import BF16, FP32, VOCABULARY, World, make, soft_cap

SIZES = [1, 3 * VOCABULARY, 7 * VOCABULARY + 1]


def gradients(world: World, projection: Projection) -> list[Tensor]:
    """Return log-probabilities and gradients; weight and bias are put together from cuts."""
    weight = torch.full(world.weight.shape, torch.nan, dtype=world.weight.dtype)
    bias = torch.full((VOCABULARY,), torch.nan, dtype=world.weight.dtype)

    def put(first_token: int, d_weight: Tensor | None, d_bias: Tensor | None) -> None:
        assert d_weight is not None
        assert d_bias is not None
        weight[first_token : first_token + len(d_weight)] = d_weight
        bias[first_token : first_token + len(d_bias)] = d_bias

    trained = trained_rows(world.targets)
    result = head_gradients(world.rows, trained, world.token_weights, projection, put)
    return [result.logprobs, result.rows, weight, bias]


@pytest.mark.parametrize("scores", [None, soft_cap])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("size", SIZES)
def test_parts_and_cuts_change_no_bit(
    dtype: torch.dtype, size: int, scores: Callable[[Tensor], Tensor] | None
) -> None:
    world = make(dtype, bias=True, scores=scores)
    trained, whole = trained_rows(world.targets), world.projection
    cut = replace(whole, part_elements=size)
    expected = head_logprobs(world.rows, trained, whole)
    assert torch.equal(head_logprobs(world.rows, trained, cut), expected)
    for found, wanted in zip(gradients(world, cut), gradients(world, whole), strict=True):
        assert torch.equal(found, wanted)


def test_a_part_that_keeps_the_marks_of_the_one_before_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make(bias=True)
    expected = gradients(world, world.projection)
    real = Tensor.scatter_

    def never_clears(self: Tensor, dim: int, index: Tensor, value: object) -> Tensor:
        return self if isinstance(value, float) else real(self, dim, index, value)  # type: ignore[call-overload]

    monkeypatch.setattr(Tensor, "scatter_", never_clears)
    found = gradients(world, replace(world.projection, part_elements=3 * VOCABULARY))
    assert not torch.allclose(found[1], expected[1])


def peak(part_elements: int) -> int:
    """Return the peak of going back, less logits and what is as large as the rows."""
    width, rows = 512, torch.randn(8, 512)
    weight = torch.randn(VOCABULARY, width).requires_grad_()
    projection = Projection(weight=weight, part_elements=part_elements)
    d_logits = torch.randn(8, VOCABULARY)
    with LiveBytes() as count:
        d_rows = projection.back(d_logits, rows, lambda first, d_weight, d_bias: None)
    return int(count.peak - d_rows.nbytes)


def test_the_gradient_of_a_table_that_is_cut_never_exists_as_a_whole() -> None:
    table = 4 * VOCABULARY * 512
    assert peak(VOCABULARY * 512) == table
    assert peak(10 * 512) == table // 5
