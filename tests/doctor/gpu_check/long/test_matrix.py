"""The matrix of choices: each point a row, kept as it comes, or why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.doctor.gpu_check.long import matrix as module
from megatrain.doctor.gpu_check.long.matrix import POINTS, measure
from megatrain.errors import DeviceFull
from tests.doctor.gpu_check.long.givens import Kept, given_on_cpu


def rows_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["choice"]: row for row in found["tables"]["Choices"]}


@pytest.mark.merge
def test_every_choice_is_measured_or_says_why_not(tmp_path: Path) -> None:
    kept = Kept()
    found = measure(given_on_cpu(kept, tmp_path))
    rows = rows_of(found)
    assert list(rows) == [point.name for point in POINTS]
    assert rows["usual"]["step_s"] > 0
    assert rows["usual"]["predicted_s"] > 0
    assert rows["four times the tokens"]["tokens"] == 4 * rows["usual"]["tokens"]
    for row in rows.values():
        assert ("tokens_per_s" in row) != ("left_out" in row), row
    assert [len(part["tables"]["Choices"]) for part in kept.found] == list(
        range(1, len(POINTS) + 1)
    )


def test_faults_end_a_point_alone_and_a_lost_device_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(given: Any, model: Any, steps: Any, point: Any, settings: Any) -> dict[str, Any]:
        if point.name == "not packed":
            raise DeviceFull("device memory: slots need 4.0 GiB, 1.0 GiB are free")
        if point.name == "twice the tokens":
            raise RuntimeError("an illegal memory access")
        return {"tokens_per_s": 1.0}

    monkeypatch.setattr(module, "_timed", timed)
    rows = rows_of(measure(given_on_cpu(Kept(), tmp_path)))
    assert "slots need 4.0 GiB" in rows["not packed"]["left_out"]
    assert rows["half the tokens"] == {
        "choice": "half the tokens", "tokens": rows["usual"]["tokens"] // 2, "tokens_per_s": 1.0
    }  # fmt: skip
    assert "illegal memory access" in rows["twice the tokens"]["left_out"]
    assert rows["three slots"]["left_out"] == module.LOST


def test_points_without_time_are_named(tmp_path: Path) -> None:
    found = measure(given_on_cpu(Kept(), tmp_path, until=0.0))
    assert {row["left_out"] for row in rows_of(found).values()} == {"no time was left"}
    assert found["lead"] == "No point was measured."
