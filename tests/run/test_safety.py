"""Time to safety in figures and words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.run.safety import Safety

BASE = Safety(
    notice_s=30.0,
    every=500,
    step_s=443.0,
    leave_s=2.0,
    can_leave=True,
    num_bytes=10 * 10**9,
    disk_bytes_per_s=2e9,
    bucket="s3://bucket/run",
    bucket_bytes_per_s=1e9,
)


def test_what_fits_loses_the_step_that_is_interrupted() -> None:
    assert BASE.needs_s == 2 + 5 + 10
    assert BASE.lost_steps == 0
    assert BASE.in_words() == (
        "notice 30s: leaving a step up to 2.0 s, a checkpoint of 9.3 GiB 5.0 s, its upload 10.0 s: "
        "SIGTERM loses the step that it interrupts, 443.0 s of work, and no other"
    )


@pytest.mark.parametrize(
    ("changes", "lost", "text"),
    [
        ({"notice_s": 18.0}, 500, "17 s do not fit. SIGTERM may lose the last 500 steps and those"),
        ({"can_leave": False}, 500, "a step whose updates have begun cannot be left"),
        ({"notice_s": 5.0, "every": "30min"}, None, "may lose the work of 30min and 15 s"),
        ({"notice_s": 5.0, "every": None}, None, "all steps, because save.every is null"),
    ],
)
def test_what_does_not_fit_says_what_may_be_lost(
    changes: dict[str, object], lost: int | None, text: str
) -> None:
    safety = replace(BASE, **changes)  # type: ignore[arg-type]
    assert safety.lost_steps == lost
    assert text in safety.in_words()
