"""Updates by threads, alone and beside copies."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megatrain.doctor.gpu_check.long import update_threads as module
from megatrain.doctor.gpu_check.long.update_threads import both_rates, counts_for, measure
from testkit.patience import HANG_S
from tests.doctor.gpu_check.long.givens import Kept, given_on_cpu


def test_every_count_up_to_the_cores_is_tried() -> None:
    assert counts_for(1) == [1]
    assert counts_for(6) == [1, 2, 4, 6]
    assert counts_for(128)[-3:] == [48, 64, 128]


def test_each_count_has_its_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PARAMS", 64 << 16)
    monkeypatch.setattr(module, "COPY_BYTES", 64 << 20)
    monkeypatch.setattr(module, "num_cores", lambda: 2)
    kept = Kept()
    found = measure(given_on_cpu(kept, tmp_path))
    rows = found["tables"]["Threads"]
    assert [row["threads"] for row in rows] == [1, 2]
    assert all(value > 0 for row in rows for value in row.values())
    assert len(kept.found) == 2
    over = measure(given_on_cpu(kept, tmp_path, until=0.0))
    assert [row["left_out"] for row in over["tables"]["Threads"]] == ["no time was left"] * 2


def test_both_are_done_at_once_and_an_error_of_either_is_raised() -> None:
    met = threading.Event()

    def waits() -> None:
        assert met.wait(HANG_S)

    first, second = both_rates(waits, met.set, threading.Lock, 0.01)
    assert first > 0
    assert second > 0

    def fails() -> None:
        raise OSError("the copy broke")

    with pytest.raises(OSError, match="the copy broke"):
        both_rates(lambda: None, fails, threading.Lock, 0.01)
