"""The short forms of `python -m proofs.peers` and of its audit, and that they would notice."""

from __future__ import annotations

import pytest

from testkit.patience import HANG_S
from testkit.proof_calls import found_by

pytestmark = pytest.mark.night


def test_honest_peers_have_one_anchor() -> None:
    found = found_by("proofs.peers", "--kills", "10", "--bad", "10", limit_s=5 * HANG_S)
    assert (found["anchors_differ"], found["bad_entered"], found["lost"]) == (0, 0, 0)


def test_frauds_are_found_and_honest_rounds_are_true() -> None:
    found = found_by("proofs.peers.audited", "--count", "4", limit_s=5 * HANG_S)
    assert (found["frauds"], found["missed"], found["accused"]) == (4, 0, 0)


def test_a_fraud_that_is_not_found_would_be_noticed() -> None:
    assert (
        found_by("proofs.peers.audited", "--count", "2", "--spoil", limit_s=5 * HANG_S)["missed"]
        == 2
    )
