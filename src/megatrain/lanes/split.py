"""Where a step's time went: compute, and what compute waited for.

Law (tests/lanes/test_split.py): the parts add up to the time of the step.
"""

from __future__ import annotations

from megatrain.lanes.trace import Trace
from megatrain.step.ops import PARTS


def step_split(trace: Trace, seconds: float, data_seconds: float = 0.0) -> dict[str, float]:
    """Return the seconds of a step by cause; they add up to `seconds`, data included.

    `trace` has the spans of this step alone. Whatever compute did not wait for counts as compute.
    A device's compute has been at the pace of the host for as long as `issue` says.
    """
    split = {part: 0.0 for part in (*PARTS, "data") if part not in ("gather", "issue")}
    for summary in trace.step_summaries():
        for kind, waited in summary.compute_waited_s.items():  # of ranks, for other ranks too
            split[kind.spec.part] = split.get(kind.spec.part, 0.0) + waited
        if summary.host_paced_s:
            split["issue"] = split.get("issue", 0.0) + summary.host_paced_s
    split["data"] = data_seconds
    split["compute"] = max(0.0, seconds - sum(split.values()) + split["compute"])
    return {name: round(value, 6) for name, value in split.items()}
