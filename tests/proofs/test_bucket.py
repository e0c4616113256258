"""The short form of `python -m proofs.bucket`, and that it would notice what it is there for."""

from __future__ import annotations

import pytest

from testkit.patience import HANG_S
from testkit.proof_calls import found_by

pytest.importorskip("obstore", reason="obstore is not installed")
pytest.importorskip("moto", reason="moto is not installed")
pytestmark = pytest.mark.merge


def test_nothing_acknowledged_is_lost_or_mixed() -> None:
    found = found_by("proofs.bucket", "--count", "12", limit_s=HANG_S)
    assert (found["lost"], found["mixed"]) == (0, 0), found
    assert found["disturbances"] >= 12
    assert found["failures"] == []
    assert found["told acknowledged"] > 0  # how many depends on what else the machine does


@pytest.mark.parametrize(("spoil", "key"), [("order", "mixed"), ("fence", "lost")])
def test_what_is_broken_would_be_noticed(spoil: str, key: str) -> None:
    found = found_by("proofs.bucket", "--count", "48", "--spoil", spoil, limit_s=HANG_S)
    assert found[key] > 0, found
