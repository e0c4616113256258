"""Laws of narrowing.py: the nearest codes of nf4, whatever the pieces.

The other oracle, bitsandbytes, is in proofs/narrow.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.disk.hf import narrowing
from megatrain.disk.hf.narrowing import narrow_nf4
from megatrain.models.widening import nf4_table, widened
from megatrain.narrow import Matrices, nf4_on_load


def _weight(rows: int, columns: int) -> Tensor:
    random = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=random).mul_(0.02)
    weight[0, :64] = 0  # a block without any magnitude
    return weight.bfloat16()


def _narrowed(matrices: Matrices, weight: Tensor, run: int) -> Tensor:
    data = torch.zeros(matrices.num_bytes, dtype=torch.uint8)
    for name, first, numbers in narrow_nf4(iter(torch.split(weight.view(-1), run))):
        begin = matrices.arrays[name].start + first * numbers.element_size()
        data[begin : begin + numbers.nbytes] = numbers.view(torch.uint8)
    return data


@pytest.mark.parametrize("matrices", [nf4_on_load((64, 96)), nf4_on_load((5, 22))])
def test_runs_change_nothing(matrices: Matrices, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight(matrices.rows, matrices.columns)
    whole = _narrowed(matrices, weight, weight.numel())
    assert torch.equal(_narrowed(matrices, weight, 77), whole)
    monkeypatch.setattr(narrowing, "AT_ONCE", 256)
    assert torch.equal(_narrowed(matrices, weight, 1000), whole)


def test_rounding_is_small() -> None:
    matrices, weight = nf4_on_load((256, 384)), _weight(256, 384)
    found = widened((matrices,), _narrowed(matrices, weight, 999), (256, 384), torch.float32)
    assert (found - weight).norm() < 0.11 * weight.float().norm()


def test_a_code_of_nf4_is_the_nearest() -> None:
    matrices, weight = nf4_on_load((64, 64)), _weight(64, 64)
    packed = _narrowed(matrices, weight, 4096)[:2048]
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).view(64, 64)
    scaled = weight.float() / weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-38)
    nearest = (scaled[..., None] - nf4_table()).abs().argmin(dim=-1)
    assert torch.equal(codes.long(), nearest)
