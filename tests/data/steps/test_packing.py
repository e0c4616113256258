"""Packing: every document once, no row too long, hardly any room left, the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data.steps.order import InOrder, ShuffledOrder
from megatrain.data.steps.packing import WINDOW_ROWS, Windows, pack, pack_in_order
from megatrain.errors import DataError
from testkit.made_documents import MadeDocuments


def _faults(lengths: list[int], rows: list[list[int]], max_length: int) -> list[str]:
    """What a packing breaks of its laws."""
    found = []
    if sorted(place for row in rows for place in row) != list(range(len(lengths))):
        found.append("not every document once")
    if any(sum(lengths[place] for place in row) > max_length for row in rows):
        found.append("too long")
    return found


@given(lengths=st.lists(st.integers(1, 64), max_size=200))
def test_every_document_is_in_one_row_that_holds_it(lengths: list[int]) -> None:
    assert _faults(lengths, pack(lengths, 64), 64) == []


@given(lengths=st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_no_two_rows_could_be_one(lengths: list[int]) -> None:
    filled = sorted(sum(lengths[place] for place in row) for row in pack(lengths, 64))
    assert len(filled) < 2 or filled[0] + filled[1] > 64


def _windows(mean: float, sigma: float, max_length: int, seed: int = 1) -> Windows:
    sample = np.random.default_rng(0).lognormal(mean, sigma, 20_000)
    lengths = np.clip(sample, 1, max_length).astype(np.int64)
    documents = MadeDocuments(lengths.tolist())
    order = ShuffledOrder(len(lengths), 0)
    return Windows(order, documents, max_length, packing=True, num_rows=WINDOW_ROWS, seed=seed)


@pytest.mark.parametrize(
    ("mean", "sigma", "max_length"), [(5, 1, 2048), (6, 1, 2048), (6, 0.7, 4096), (7, 1, 2048)]
)
def test_log_normal_documents_fill_their_rows(mean: float, sigma: float, max_length: int) -> None:
    windows = _windows(mean, sigma, max_length)
    num_rows = sum(len(windows.rows(0, number)) for number in range(windows.num_windows))
    assert windows.lengths.sum() / (num_rows * max_length) >= 0.97


def test_windows_cover_an_epoch() -> None:
    windows = _windows(6, 1, 2048)
    assert windows.num_windows == -(-20_000 // WINDOW_ROWS)
    documents = [
        int(document)
        for number in range(windows.num_windows)
        for row in windows.rows(3, number)
        for document in row
    ]
    assert sorted(documents) == list(range(20_000))


def test_a_window_is_the_same_whenever_it_is_made() -> None:
    def rows(seed: int, epoch: int) -> list[list[int]]:
        return [row.tolist() for row in _windows(6, 1, 2048, seed).rows(epoch, 2)]

    assert rows(1, 0) == rows(1, 0)
    assert rows(1, 0) != rows(2, 0)
    assert rows(1, 0) != rows(1, 1)


def test_rows_are_not_in_order_of_length() -> None:
    windows = _windows(6, 1, 2048)
    counts = [len(row) for row in windows.rows(0, 0)]
    assert abs(np.corrcoef(np.arange(len(counts)), counts)[0, 1]) < 0.15


def test_a_document_that_fits_no_row_is_refused() -> None:
    with pytest.raises(DataError, match="document 1 has 65 tokens, rows have 64"):
        Windows(
            ShuffledOrder(2, 0),
            MadeDocuments([3, 65]),
            64,
            packing=True,
            num_rows=WINDOW_ROWS,
            seed=0,
        )


@given(lengths=st.lists(st.integers(1, 64), max_size=200))
def test_packing_in_order_keeps_the_order(lengths: list[int]) -> None:
    rows = pack_in_order(lengths, 64)
    assert _faults(lengths, rows, 64) == []
    assert [place for row in rows for place in row] == list(range(len(lengths)))


@pytest.mark.parametrize("packing", [True, False])
def test_a_window_holds_all_documents_of_its_rows(packing: bool) -> None:
    documents = MadeDocuments([5, 6, 7, 8, 9, 10], counts=[1, 3, 2])
    windows = Windows(InOrder(3), documents, 64, packing=packing, num_rows=2, seed=0)
    found = [sorted(int(d) for row in windows.rows(0, w) for d in row) for w in range(2)]
    assert found == [[0, 1, 2, 3], [4, 5]]
