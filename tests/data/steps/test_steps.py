"""Steps: a run that is stopped anywhere sees what the uninterrupted run sees."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from megatrain.data.steps import packing as packing_module
from megatrain.data.steps import steps as steps_module
from megatrain.data.steps.order import InOrder, MixedOrder, Order, ShuffledOrder
from megatrain.data.steps.steps import Position, Steps
from megatrain.errors import ConfigError, DataError
from testkit.effort import require_effort
from testkit.made_documents import MadeDocuments, documents_in, log_normal

DOCUMENTS = log_normal(700, 64)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_module, "WINDOW_ROWS", 60)
    monkeypatch.setattr(steps_module, "WINDOW_ROWS", 60)


def _steps(
    documents: MadeDocuments = DOCUMENTS, order: Order | None = None, **changes: Any
) -> Steps:
    settings: dict[str, Any] = {
        "batch_tokens": 512, "micro_batch_tokens": 128, "max_length": 64, "seed": 3, **changes
    }  # fmt: skip
    return Steps(documents, order or ShuffledOrder(len(documents.lengths), 3), **settings)


def _run(
    steps: Steps, position: Position, last_epoch: int
) -> list[tuple[Position, list[list[int]]]]:
    found = []
    while position.epoch < last_epoch:
        rows, after = steps.rows(position)
        found.append((position, [row.tolist() for row in rows]))
        position = after
    return found


@pytest.mark.merge
@pytest.mark.parametrize("packing", [True, False])
def test_a_thousand_stops_lose_and_repeat_nothing(packing: bool) -> None:
    """Each stop goes through JSON into new objects, as after a kill."""
    whole = _run(_steps(packing=packing), Position(), 3)
    choose = random.Random(0)
    for _ in range(1000 if packing else 100):
        at = choose.randrange(len(whole))
        fresh = _steps(packing=packing)
        state = json.loads(json.dumps(fresh.state(whole[at][0])))
        position = fresh.position(state)
        for expected in whole[at : at + 3]:
            rows, after = fresh.rows(position)
            assert (position, [row.tolist() for row in rows]) == expected
            position = after


def test_a_position_one_row_off_would_be_noticed() -> None:
    whole = _run(_steps(), Position(), 1)
    rows, _ = _steps().rows(Position(row=1))
    assert [row.tolist() for row in rows] != whole[0][1]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_document_comes_once_per_epoch(epoch: int, packing: bool) -> None:
    steps = _steps(packing=packing)
    seen: Counter[int] = Counter()
    position = Position(epoch=epoch)
    while position.epoch == epoch:
        batch, position = steps.batch(position)
        seen += documents_in(batch)
    assert seen == dict.fromkeys(range(700), 1)


@pytest.mark.parametrize("packing", [True, False])
def test_steps_hold_about_the_tokens_asked_for(packing: bool) -> None:
    steps, position = _steps(packing=packing), Position()
    totals = []
    while position.epoch == 0:
        batch, position = steps.batch(position)
        totals.append(sum(micro.num_tokens for micro in batch))
        assert max(micro.input_ids.numel() for micro in batch) <= 128
    assert max(totals) <= 512
    assert min(totals[:-1]) > 512 - 64
    assert steps.count() == len(totals)


def test_the_batch_may_change_when_a_run_goes_on() -> None:
    before, after = _steps(), _steps(batch_tokens=1024)
    _, position = before.rows(Position())
    there = after.position(before.state(position))
    first = {int(d) for row in before.rows(Position())[0] for d in row}
    rest = [int(d) for p, rows in _run(after, there, 1) for row in rows for d in row]
    assert sorted([*first, *rest]) == list(range(700))


def test_mixtures_have_positions_too() -> None:
    documents = log_normal(500, 64)
    order = MixedOrder([100, 400], [2, 0.7], 3)
    whole = _run(_steps(documents, order), Position(), 2)
    fresh = _steps(documents, MixedOrder([100, 400], [2, 0.7], 3))
    assert _run(fresh, whole[7][0], 2) == whole[7:]


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 4},
        {"max_length": 65},
        {"packing": False},
        {"order": InOrder(700)},
        {"order": MixedOrder([350, 350], [1, 2], 3)},
        {"shuffle": False},
        {"batch_tokens": None, "batch_rows": 50},
        {"documents": log_normal(700, 64, 9)},
    ],
)
def test_a_position_of_another_order_is_refused(other: dict[str, Any]) -> None:
    state = _steps().state(Position())
    with pytest.raises(DataError, match="belongs to other data or settings"):
        _steps(**other).position(state)


@pytest.mark.parametrize("wrong", [{"window": 12}, {"row": 9999}, {"epoch": -1}])
def test_a_position_that_is_none_is_refused(wrong: dict[str, int]) -> None:
    steps = _steps()
    with pytest.raises(DataError, match="the saved position is invalid"):
        steps.position({**steps.state(Position()), **wrong})


@pytest.mark.parametrize("wrong", [{"max_length": 129}, {"batch_tokens": 127}])
def test_sizes_must_fit_into_each_other(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a row must fit in a micro-batch"):
        _steps(**wrong)


ROWS = MadeDocuments(log_normal(700, 64).lengths.tolist(), counts=[1, 2, 4] * 100)
"""300 rows of one, two and four documents."""


def _by_rows(batch_rows: int, **changes: Any) -> Steps:
    settings = {"batch_tokens": None, "batch_rows": batch_rows, **changes}
    return _steps(ROWS, settings.pop("order", None) or ShuffledOrder(300, 3), **settings)


@pytest.mark.parametrize("packing", [True, False])
def test_a_step_by_rows_has_exactly_that_many_rows(packing: bool) -> None:
    """All documents of a row are in one step; the last step of an epoch may be short."""
    steps, position, seen = _by_rows(16, packing=packing), Position(), []
    while position.epoch < 2:
        batch, position = steps.batch(position)
        documents = documents_in(batch)
        assert set(documents.values()) == {1}
        rows = np.searchsorted(ROWS.row_starts, sorted(documents), side="right") - 1
        counts = Counter(rows.tolist())
        assert all(counts[row] == np.diff(ROWS.row_starts)[row] for row in counts)
        seen.append(list(counts))
        assert max(micro.input_ids.numel() for micro in batch) <= 128
    assert [len(rows) for rows in seen] == ([16] * 18 + [12]) * 2
    assert steps.count() == 19 == -(-300 // 16)
    assert sorted(row for rows in seen[:19] for row in rows) == list(range(300))


def test_by_rows_and_unpacked_an_epoch_is_the_permutation_itself() -> None:
    steps = _by_rows(7, packing=False)
    documents = [int(d) for _, rows in _run(steps, Position(), 1) for row in rows for d in row]
    rows = np.searchsorted(ROWS.row_starts, documents, side="right") - 1
    expected = ShuffledOrder(300, 3).rows(0, 0, 300)
    assert list(dict.fromkeys(rows.tolist())) == expected.tolist()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("batch", [{"batch_tokens": 512}, {"batch_rows": 7}])
def test_without_shuffling_steps_keep_the_order_of_the_file(
    packing: bool, batch: dict[str, int]
) -> None:
    settings: dict[str, Any] = {"batch_tokens": None, **batch, "packing": packing}
    steps = _steps(ROWS, InOrder(300), shuffle=False, **settings)
    for epoch in range(2):
        run = _run(steps, Position(epoch=epoch), epoch + 1)
        assert [d for _, rows in run for row in rows for d in row] == list(range(700))


def test_stops_between_steps_by_rows_lose_and_repeat_nothing() -> None:
    whole = _run(_by_rows(16), Position(), 3)
    for at in range(0, len(whole), 5):
        fresh = _by_rows(16)
        state = json.loads(json.dumps(fresh.state(whole[at][0])))
        assert _run(fresh, fresh.position(state), 3) == whole[at:]


@pytest.mark.parametrize("batch", [{"batch_rows": 8}, {"batch_tokens": None}])
def test_a_step_has_one_measure(batch: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give either batch_tokens or batch_rows"):
        _steps(**batch)


class _Endless:
    """Lengths of 10**12 documents, each a row, without the bytes."""

    size = 10**12

    def __getitem__(self, documents: Any) -> Any:
        return np.full(np.shape(documents), 20)

    def max(self, initial: int = 0) -> int:
        return 20

    def tobytes(self) -> bytes:
        return b"20"


class _EachARow(_Endless):
    def __getitem__(self, rows: Any) -> Any:
        return np.array(rows)


def test_seeking_far_out_takes_little() -> None:
    documents: Any = MadeDocuments([20])
    documents.lengths = _Endless()
    documents.row_starts = _EachARow()
    far = Position(epoch=2, window=10**12 // 60 - 7, row=3)
    steps = _steps(documents, ShuffledOrder(10**12, 3))
    state = steps.state(far)

    def seek() -> None:
        rows, _ = steps.rows(steps.position(state))
        assert rows

    require_effort(seek, at_most=0.2)
