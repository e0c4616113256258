"""The short form of `python -m proofs.peers.link`, which has peers that wait as its sibling."""

from __future__ import annotations

import pytest

from testkit.patience import HANG_S
from testkit.proof_calls import found_by
from testkit.shaped_link import missing

pytest.importorskip("obstore", reason="obstore is not installed")
pytest.importorskip("moto", reason="moto is not installed")
pytestmark = [
    pytest.mark.night,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


def test_exchanges_hide_behind_steps_on_a_link_of_20_mbit() -> None:
    found = found_by("proofs.peers.link", "--rounds", "1", limit_s=3 * HANG_S)
    assert found["failures"] == []
    assert found["exposed_share"] < 0.05 < 0.3 < found["exposed_share_waiting"], found
