"""Bytes and traffic follow from what an optimizer declares."""

from __future__ import annotations

import pytest

from megatrain.memory.kinds import TensorKind, bytes_per_param, state, store_kinds, update_traffic
from megatrain.optim.states import ADAMW
from testkit.lion import EIGHT_BIT, LION

HALVES = (state("m", "m", "bfloat16"), state("v", "v", "bfloat16"))


@pytest.mark.parametrize(
    ("states", "late", "in_backward", "traffic", "traffic_fp32"),
    [
        (ADAMW, 14, 12, 26, 28),
        (LION, 10, 8, 18, 20),
        (HALVES, 10, 8, 18, 20),
        (EIGHT_BIT, 7.03125, 5.03125, 12.0625, 14.0625),
        ((), 6, 4, 10, 12),
    ],
)
def test_bytes_and_traffic_per_param(
    states: tuple[TensorKind, ...],
    late: float,
    in_backward: float,
    traffic: float,
    traffic_fp32: float,
) -> None:
    assert bytes_per_param(store_kinds(states, waits=True)) == late
    assert bytes_per_param(store_kinds(states, waits=False)) == in_backward
    assert update_traffic(states) == traffic
    assert update_traffic(states, is_fp32=True) == traffic_fp32


def test_a_kind_is_known_by_its_name_and_numbers_and_not_by_its_purpose() -> None:
    assert state("m", "first moment") == state("m", "momentum")
    assert state("m", "m") != state("m", "m", "bfloat16")
    assert str(TensorKind.HI) == "hi"
