"""The short form of `python -m proofs.notice`, and that it would notice a step that is finished."""

from __future__ import annotations

import pytest

from testkit.patience import HANG_S
from testkit.proof_calls import found_by

pytestmark = pytest.mark.night


def test_every_process_ends_in_time_and_loses_nothing() -> None:
    found = found_by("proofs.notice", "--count", "6", limit_s=5 * HANG_S)
    assert (found["notices"], found["late"], found["lost"], found["different"]) == (6, 0, 0, 0)
    assert found["failures"] == []


def test_a_step_that_is_finished_would_be_noticed() -> None:
    assert (
        found_by("proofs.notice", "--count", "4", "--spoil", "finish", limit_s=5 * HANG_S)["late"]
        > 0
    )
