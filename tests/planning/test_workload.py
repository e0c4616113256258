"""A step's tokens in micro-batches, and what of a store is on disk meanwhile."""

from __future__ import annotations

from megatrain.planning.workload import Workload
from testkit.machines import EIGHT


def test_the_last_micro_batch_may_be_smaller() -> None:
    workload = Workload(model=EIGHT, step_tokens=10, sequence=2)
    assert workload.micro_sizes(4) == [4, 4, 2]
    assert workload.num_micro(4) == 3
    assert workload.micro_sizes(5) == [5, 5]
