"""Laws of narrow.py: arrays that lie apart, and few bytes per element."""

from __future__ import annotations

import pytest

from megatrain.narrow import (
    GRAIN,
    Matrices,
    find_matrix,
    form_bytes,
    joined,
    nf4_on_load,
    published,
)

ODD = [
    Matrices(method="fp8", count=3, rows=7, columns=10, block=(4, 4), scale="bfloat16"),
    Matrices(method="mxfp4", count=2, rows=5, columns=64, block=(1, 32), scale="uint8"),
    Matrices(method="int4", count=1, rows=3, columns=40, block=(1, 16), scale="float16"),
    nf4_on_load((4, 9, 22)),
    Matrices(method="fp8", count=1, rows=130, columns=129, block=(128, 128)),
]


@pytest.mark.parametrize("matrices", ODD)
def test_arrays_lie_apart(matrices: Matrices) -> None:
    end = 0
    for array in matrices.arrays.values():
        assert array.start >= end
        assert array.start % GRAIN == 0
        end = array.stop
    assert end <= matrices.num_bytes < end + GRAIN


def test_every_matrix_has_its_own_bytes() -> None:
    form = tuple(ODD)
    taken: list[int] = []
    element = 0
    for matrices in form:
        for _ in range(matrices.count):
            spot = find_matrix(form, element)
            for name in matrices.arrays:
                taken += spot.array_bytes(name)
            element += matrices.matrix_elements
    assert len(taken) == len(set(taken))
    assert max(taken) < form_bytes(form)
    with pytest.raises(LookupError):
        find_matrix(form, element)


def test_equal_neighbors_are_one_sequence() -> None:
    one, other = nf4_on_load((8, 16)), Matrices(method="fp8", count=1, rows=8, columns=16)
    assert joined([one, one, other, one]) == (nf4_on_load((2, 8, 16)), other, one)


@pytest.mark.parametrize(
    ("matrices", "most"),
    [
        (published((7168, 2048), "fp8", (128, 128)), 1.05),
        (published((256, 4096, 7168), "fp8", (128, 128)), 1.05),
        (published((128, 2880, 5760), "mxfp4", None), 0.6),
        (published((384, 4096, 7168), "int4", (1, 32)), 0.6),
        (nf4_on_load((4096, 4096)), 0.6),
    ],
)
def test_few_bytes_per_element(matrices: Matrices, most: float) -> None:
    assert form_bytes((matrices,)) <= most * matrices.num_elements
