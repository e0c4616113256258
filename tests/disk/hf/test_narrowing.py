"""Laws of narrowing.py: transformers' fp8, the nearest codes of nf4, whatever the pieces.

The other oracle of nf4, bitsandbytes, is in proofs/narrow.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from megatrain.disk.hf import narrowing
from megatrain.disk.hf.narrowing import narrow_matrix
from megatrain.models.widening import nf4_table, widened
from megatrain.narrow import Matrices, fp8_on_load, nf4_on_load


def _weight(rows: int, columns: int) -> Tensor:
    random = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=random).mul_(0.02)
    weight[0, :64] = 0  # a block without any magnitude
    return weight.bfloat16()


def _narrowed(matrices: Matrices, weight: Tensor, run: int) -> Tensor:
    data = torch.zeros(matrices.num_bytes, dtype=torch.uint8)
    for name, first, numbers in narrow_matrix(matrices, iter(torch.split(weight.view(-1), run))):
        begin = matrices.arrays[name].start + first * numbers.element_size()
        data[begin : begin + numbers.nbytes] = numbers.view(torch.uint8)
    return data


def test_fp8_has_the_bytes_of_transformers() -> None:
    matrices, weight = fp8_on_load(256, 384), _weight(256, 384)
    how = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    made = Fp8Quantize(SimpleNamespace(quantization_config=how)).convert({"x.weight": weight})
    data, arrays = _narrowed(matrices, weight, 5000), matrices.arrays
    values = data[: arrays["values"].stop]
    scales = data[arrays["scales"].start : arrays["scales"].stop].view(torch.float32)
    assert torch.equal(values, made["x.weight"].view(torch.uint8).view(-1))
    assert torch.equal(scales, made["x.weight_scale_inv"].view(-1))


@pytest.mark.parametrize(
    "matrices", [fp8_on_load(200, 130), nf4_on_load(64, 96), nf4_on_load(5, 22)]
)
def test_runs_change_nothing(matrices: Matrices, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight(matrices.rows, matrices.columns)
    whole = _narrowed(matrices, weight, weight.numel())
    assert torch.equal(_narrowed(matrices, weight, 77), whole)
    monkeypatch.setattr(narrowing, "AT_ONCE", 256)
    assert torch.equal(_narrowed(matrices, weight, 1000), whole)


@pytest.mark.parametrize(
    ("matrices", "most"), [(fp8_on_load(256, 384), 0.04), (nf4_on_load(256, 384), 0.11)]
)
def test_rounding_is_small(matrices: Matrices, most: float) -> None:
    weight = _weight(matrices.rows, matrices.columns)
    found = widened((matrices,), _narrowed(matrices, weight, 999), (256, 384), torch.float32)
    assert (found - weight).norm() < most * weight.float().norm()


def test_a_code_of_nf4_is_the_nearest() -> None:
    matrices, weight = nf4_on_load(64, 64), _weight(64, 64)
    packed = _narrowed(matrices, weight, 4096)[:2048]
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).view(64, 64)
    scaled = weight.float() / weight.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-38)
    nearest = (scaled[..., None] - nf4_table()).abs().argmin(dim=-1)
    assert torch.equal(codes.long(), nearest)


def test_mxfp4_keeps_what_it_can_hold() -> None:
    matrices = Matrices(method="mxfp4", count=1, rows=8, columns=64, block=(1, 32), scale="uint8")
    random = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (matrices.num_bytes,), dtype=torch.uint8, generator=random)
    scales = matrices.arrays["scales"]
    data[scales.start : scales.stop] = torch.arange(100, 116, dtype=torch.uint8)
    turned = widened((matrices,), data, (64, 8), torch.bfloat16)
    again = _narrowed(matrices, turned.T.contiguous(), 100)
    assert torch.equal(widened((matrices,), again, (64, 8), torch.bfloat16), turned)
    other = turned.float() * 1.1
    rounded = _narrowed(matrices, other.T.contiguous(), 100)
    found = widened((matrices,), rounded, (64, 8), torch.float32)
    assert (found - other).norm() < 0.2 * other.norm()
    assert not torch.equal(found, other)
