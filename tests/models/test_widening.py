"""Laws of widening.py: the same bits whatever is widened at once, and those of the formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.models import widening
from megatrain.models.widening import dynamic_table, nf4_table, widened, widened_matrix
from megatrain.narrow import Form, Matrices, find_matrix, form_bytes, nf4_on_load

FORMS: dict[str, Form] = {
    "fp8": (
        Matrices(method="fp8", count=3, rows=40, columns=48, block=(16, 32)),
        Matrices(method="fp8", count=1, rows=7, columns=10, block=(7, 10), scale="bfloat16"),
    ),
    "fp4": (Matrices(method="fp4", count=2, rows=6, columns=64, block=(1, 32), scale="uint8"),),
    "mxfp4": (Matrices(method="mxfp4", count=3, rows=6, columns=64, block=(1, 32), scale="uint8"),),
    "int4": (
        Matrices(method="int4", count=2, rows=6, columns=64, block=(1, 16), scale="bfloat16"),
    ),
    "nf4": (nf4_on_load((3, 20, 64)), nf4_on_load((3, 50))),
}


def _bytes(form: Form) -> Tensor:
    """Return random values with mild scales."""
    random = torch.Generator().manual_seed(0)
    data = torch.randint(0, 127, (form_bytes(form),), dtype=torch.uint8, generator=random)
    start = 0
    for matrices in form:
        for array in list(matrices.arrays.values())[1:]:
            here = data[start + array.start : start + array.stop]
            dtype = getattr(torch, array.dtype)
            if dtype.is_floating_point:
                scales = torch.rand(here.numel() // dtype.itemsize, generator=random) / 50
                here.copy_(scales.to(dtype).view(torch.uint8))
        start += matrices.num_bytes
    return data


def _widened(form: Form, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    count = sum(matrices.num_elements for matrices in form)
    return widened(form, _bytes(form), (count,), dtype)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("at_once", [64, 500, 1 << 12])
def test_the_number_of_elements_at_once_changes_nothing(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _widened(FORMS[name])
    monkeypatch.setattr(widening, "AT_ONCE", at_once // 64 * 64)
    assert torch.equal(_widened(FORMS[name]), whole)


@pytest.mark.parametrize("name", FORMS)
def test_one_matrix_is_that_of_the_whole(name: str) -> None:
    form, element = FORMS[name], 0
    whole, data = _widened(form), _bytes(form)
    while element < len(whole):
        matrix = widened_matrix(find_matrix(form, element), data, torch.bfloat16)
        assert torch.equal(matrix, whole[element : element + len(matrix)])
        element += len(matrix)


@pytest.mark.parametrize("name", FORMS)
def test_another_byte_would_be_noticed(name: str) -> None:
    form = FORMS[name]
    data, count = _bytes(form), sum(matrices.num_elements for matrices in form)
    whole = widened(form, data, (count,), torch.float32)
    for array in form[0].arrays.values():
        changed = data.clone()
        changed[array.start] ^= 64
        assert not torch.equal(widened(form, changed, (count,), torch.float32), whole)


def test_int4_is_eight_less_times_the_scale_of_its_group() -> None:
    (matrices,) = FORMS["int4"]
    data = _bytes((matrices,))
    packed = data[: matrices.arrays["values"].stop].view(2, 6, 32)
    values = torch.stack((packed % 16, packed // 16), dim=-1).view(2, 6, 4, 16).bfloat16() - 8
    scales = matrices.arrays["scales"]
    groups = data[scales.start : scales.stop].view(torch.bfloat16).view(2, 6, 4, 1)
    assert torch.equal(_widened((matrices,)), (values * groups).view(-1))


def test_nf4_has_scales_of_scales() -> None:
    matrices = nf4_on_load((2, 64))
    data = torch.zeros(matrices.num_bytes, dtype=torch.uint8)
    arrays = matrices.arrays
    data[0], data[32] = 0x0F, 0xF7  # the first of each block: the least and largest, 1 and 0
    data[arrays["scales"].start :][:2] = torch.tensor([255, 0], dtype=torch.uint8)
    data[arrays["scales_of_scales"].start :][:4] = torch.tensor([0.5]).view(torch.uint8)
    data[arrays["offset"].start :][:4] = torch.tensor([2.0]).view(torch.uint8)
    weights = widened((matrices,), data, (2, 64), torch.float32)
    least = float(dynamic_table()[0])
    assert weights[0, :2].tolist() == [-2.5, 2.5]
    assert weights[1, :2].tolist() == pytest.approx([2 + least / 2, 0.0])


def test_tables_are_sorted() -> None:
    assert len(dynamic_table()) == 256
    for table in (dynamic_table(), nf4_table()):
        assert torch.equal(table, table.sort().values)
        assert 0.0 in table
        assert table[-1] == 1.0
