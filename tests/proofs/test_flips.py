"""The short form of `python -m proofs.flips`, and that it notices a check that is left out."""

from __future__ import annotations

import pytest

from proofs.flips import CASES, run

KINDS = sum(len(case["kinds"]) for case in CASES.values())


@pytest.mark.merge
def test_no_checkpoint_has_a_bit_that_flipped() -> None:
    found = run(2, tell=False, what=None)
    assert (found["flips"], found["missed"], found["alarm"]) == (2 * KINDS, 0, 0)
    assert found["found"] > KINDS


@pytest.mark.night
@pytest.mark.parametrize("what", ["off", "updates", "saves"])
def test_a_check_that_is_left_out_would_be_noticed(what: str) -> None:
    assert run(20, tell=False, what=what, only=["fp32"])["missed"] > 0
