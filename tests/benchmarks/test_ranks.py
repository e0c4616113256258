"""The benchmark of ranks: bytes are counted where they are sent, and both sides move the same."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import ranks as benchmark
from testkit.rank_processes import run_ranks

LAYERS, HIDDEN = 5, 64


def short_form(ranks: Any) -> dict[str, Any]:
    benchmark.WIRE_LAYERS, benchmark.WIRE_HIDDEN = LAYERS, HIDDEN
    return benchmark.on_the_wire(ranks, 1)


@pytest.mark.merge
def test_a_step_moves_what_the_law_says() -> None:
    found = run_ranks(3, short_form)
    law, twice = found[0]["law"], found[0]["twice"]
    counted = sum(one["wire_bytes"] for one in found)
    assert counted == law["gathers"] + law["padding"] + law["exchanges"]
    assert twice["gathers"] == 2 * law["owned_by_others"]
    assert law["exchanges"] == pytest.approx(law["owned_by_others"], rel=0.01)
    assert counted < twice["gathers"] + twice["padding"] + twice["exchanges"], "the sibling"
    for one in found:
        assert one["moved"] == dict.fromkeys(("wire", "bare"), one["wire_bytes"])
