"""A shaped link has the rate and the delay that it is given."""

from __future__ import annotations

import pytest

from testkit.shaped_link import missing, shaped_links

pytestmark = [
    pytest.mark.merge,
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@pytest.mark.parametrize(("rate_mbit", "round_trip_s"), [(20.0, 0.05), (8.0, 0.12)])
def test_rate_and_delay_are_those_that_were_asked_for(
    rate_mbit: float, round_trip_s: float
) -> None:
    with shaped_links(1, rate_mbit=rate_mbit, round_trip_s=round_trip_s) as (link,):
        found = link.measured(3 << 20)
    assert 0.7 * rate_mbit < min(found["up_mbit"], found["down_mbit"])
    assert max(found["up_mbit"], found["down_mbit"]) < rate_mbit
    assert 0 <= found["round_trip_ms"] - 1000 * round_trip_s < 30
