"""The trace of a step: spans of ops by lane, for people and for Perfetto.

A span is an op's own time in its lane. Where `awaited` is set it is instead time the lane
waited before `op` because `awaited`, on another lane, was not done. On a lane with a stream both
are times of the host that issues: the device's own times are not in them.

`add` is one append: any lane calls it without waiting. Read a trace when the lanes are settled.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from megatrain.files import write_file
from megatrain.step.ops import Op, OpKind


class Span(NamedTuple):
    """From `start_ns` to `end_ns` by time.perf_counter_ns, in the `step`-th list played."""

    step: int
    lane: str
    op: Op
    start_ns: int
    end_ns: int
    num_bytes: int = 0
    awaited: Op | None = None

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSummary:
    """One lane over the entire trace."""

    num_ops: int
    num_bytes: int
    busy_s: float
    busy_share: float
    """Of the time from the first start to the last end of any lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One list that was played."""

    seconds: float
    compute_waited_s: Mapping[OpKind, float]
    """How long lane `compute` waited, by the kind of op that it finally waited for: a fetch
    that itself waits for an update counts as update."""


class Trace:
    """Spans in the order they ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.add = self.spans.append

    def lane_summaries(self) -> dict[str, LaneSummary]:
        total_s = _extent_s(self.spans)
        return {
            lane: _lane_summary([span for span in self._ops() if span.lane == lane], total_s)
            for lane in self._lanes()
        }

    def step_summaries(self) -> list[StepSummary]:
        """Return one summary per list played, in order."""
        steps: dict[int, list[Span]] = {}
        waits: dict[str, list[Span]] = {}
        for span in self.spans:
            steps.setdefault(span.step, []).append(span)
            if span.awaited is not None:
                waits.setdefault(span.lane, []).append(span)
        return [_step_summary(steps[step], waits) for step in sorted(steps)]

    def write(self, path: Path) -> None:
        """Write the trace as Chrome's JSON, which Perfetto opens: one row per lane."""
        text = json.dumps({"traceEvents": list(self._events())})
        write_file(path, text.encode(), durable=False)

    def _ops(self) -> Iterator[Span]:
        return (span for span in self.spans if span.awaited is None)

    def _lanes(self) -> list[str]:
        return list(dict.fromkeys(span.lane for span in self.spans))

    def _events(self) -> Iterator[dict[str, Any]]:
        rows = {lane: row for row, lane in enumerate(self._lanes())}
        for lane, row in rows.items():
            name = {"name": lane}
            yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": name}
        origin_ns = min((span.start_ns for span in self.spans), default=0)
        for span in self.spans:
            waits = span.awaited is not None
            yield {
                "ph": "X",
                "name": f"wait for {span.awaited}" if waits else str(span.op),
                "cat": "wait" if waits else span.op.kind.value,
                "pid": 0,
                "tid": rows[span.lane],
                "ts": (span.start_ns - origin_ns) / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "args": {
                    "step": span.step,
                    "block": span.op.block,
                    "micro": span.op.micro,
                    "bytes": span.num_bytes,
                },
            }


def _extent_s(spans: list[Span]) -> float:
    first = min((span.start_ns for span in spans), default=0)
    return (max((span.end_ns for span in spans), default=0) - first) / 1e9


def _lane_summary(ops: list[Span], total_s: float) -> LaneSummary:
    busy_s = sum(span.seconds for span in ops)
    return LaneSummary(
        num_ops=len(ops),
        num_bytes=sum(span.num_bytes for span in ops),
        busy_s=busy_s,
        busy_share=busy_s / total_s if total_s else 0.0,
    )


def _step_summary(spans: list[Span], waits: Mapping[str, list[Span]]) -> StepSummary:
    blamed_ns: Counter[OpKind] = Counter()
    for span in spans:
        if span.lane == "compute" and span.awaited is not None:
            blamed_ns.update(_blame(span, waits, frozenset()))
    return StepSummary(
        seconds=_extent_s(spans),
        compute_waited_s={kind: wait_ns / 1e9 for kind, wait_ns in blamed_ns.items() if wait_ns},
    )


def _blame(wait: Span, waits: Mapping[str, list[Span]], asked: frozenset[str]) -> Counter[OpKind]:
    """Return the wait's nanoseconds by root cause.

    If the awaited lane waited too, its own wait is followed. Not twice: lanes never wait in
    a circle, but the end of a wait is noted a wake-up late and may overlap with the next.
    """
    assert wait.awaited is not None
    lane = wait.awaited.lane
    blamed: Counter[OpKind] = Counter()
    left_ns = wait.end_ns - wait.start_ns
    if lane not in asked:
        for deeper in _within(waits.get(lane, []), wait.start_ns, wait.end_ns):
            blamed.update(_blame(deeper, waits, asked | {lane}))
            left_ns -= deeper.end_ns - deeper.start_ns
    blamed[wait.awaited.kind] += left_ns
    return blamed


def _within(spans: list[Span], start_ns: int, end_ns: int) -> Iterator[Span]:
    """Yield the parts of one lane's spans that are between start and end."""
    first = bisect_right(spans, start_ns, key=lambda span: span.end_ns)
    for span in islice(spans, first, None):
        if span.start_ns >= end_ns:
            return
        yield span._replace(start_ns=max(span.start_ns, start_ns), end_ns=min(span.end_ns, end_ns))
