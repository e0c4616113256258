"""The trace of a step: spans of ops by lane, for people and for Perfetto.

A span is an op's own time in its lane. Where `awaited` is set it is instead time the lane
waited before `op` because `awaited`, on another lane, was not done.

    host lane     both are times of its thread
    device lane   both are times of the device, by the marks that its stream passed: an op from the
                  first mark to the second, a wait from when the stream was free, and the op
                  in its lane, to the end of the op it awaited that ended last

What a lane adds, it adds by one append: none waits. `collect` reads the marks that devices have
passed, once somebody has waited for the ops. Read a trace when the lanes are settled.

Laws (tests/lanes/test_trace.py)
    1. Times of a device lane are the device's. When the host issued an op changes none of them,
       unless the device had nothing else to do.
    2. The op that holds up compute is named, however many lanes lie between.
    3. The parts of a step's time add up to it.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatrain.files import write_file
from megatrain.step.hazards import Ticket
from megatrain.step.ops import PARTS, Op, OpKind

if TYPE_CHECKING:
    from megatrain.lanes.device_clock import DeviceClock, TimedEvent

_AT_ONCE = 0.1
"""Share of an op's time: a device that is done so soon after it was issued waited for the host."""


class Span(NamedTuple):
    """From `start_ns` to `end_ns` by time.perf_counter_ns, in the `step`-th list played."""

    step: int
    lane: str
    op: Op
    start_ns: int
    end_ns: int
    num_bytes: int = 0
    awaited: Op | None = None
    issued_ns: tuple[int, int] | None = None
    """Begin and end of issuing the op on the host, where the times are a device's."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class IssuedOp(NamedTuple):
    """An op on a device, whose times are known once it is done."""

    span: Span
    """Span with the times at which it was issued."""
    ticket: Ticket
    waits: Sequence[Ticket]
    taken_ns: int
    """Time at which its lane came to it, before any wait."""
    clock: DeviceClock
    begun: TimedEvent
    ended: TimedEvent

    def spans(self, free_ns: int) -> Iterator[Span]:
        """Yield the wait before it, if any, and the op. It is complete, as are those it awaited.

        `free_ns` is when its stream was done with the op before.
        """
        issued = self.span
        start_ns = max(free_ns, self.clock.read(self.begun))
        end_ns = self.ticket.end_ns = max(start_ns, self.clock.read(self.ended))
        last = max(self.waits, key=lambda ticket: ticket.end_ns, default=None)
        if last is not None:
            since_ns, until_ns = max(free_ns, self.taken_ns), min(last.end_ns, start_ns)
            if since_ns < until_ns:
                yield Span(issued.step, issued.lane, issued.op, since_ns, until_ns, awaited=last.op)
        yield issued._replace(
            start_ns=start_ns, end_ns=end_ns, issued_ns=(issued.start_ns, issued.end_ns)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSummary:
    """One lane over the entire trace."""

    num_ops: int
    num_bytes: int
    busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One list that was played."""

    seconds: float
    compute_waited_s: Mapping[OpKind, float]
    """Seconds that lane `compute` waited, by the kind of op that it finally waited for: a fetch
    that itself waits for an update counts as update."""
    host_paced_s: float = 0.0
    """Seconds that a device's lane `compute` waited for the host to issue: between ops, with none
    issued and nothing to wait for, and in ops that it had done as soon as they were issued."""

    @property
    def limits_s(self) -> dict[str, float]:
        """The seconds by what limits the step (LIMITS): `compute` is what nothing else explains."""
        found: defaultdict[str, float] = defaultdict(float, host=self.host_paced_s)
        for kind, waited_s in self.compute_waited_s.items():
            found[kind.spec.limit] += waited_s
        found["compute"] += max(0.0, self.seconds - sum(found.values()))
        return dict(found)

    @property
    def bottleneck(self) -> str:
        """The limit that takes most of the step, as a plan names it."""
        limits = self.limits_s
        return max(limits, key=lambda limit: limits[limit])


class Trace:
    """Spans; those of one lane in the order they ended."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.add = self.spans.append
        # In the order of issue: an op comes behind those that it awaits.
        self._on_device: deque[IssuedOp] = deque()
        self.add_issued = self._on_device.append
        self._free_ns: dict[str, int] = {}

    def collect(self) -> None:
        """Add the spans of ops that devices have done, but for those behind one that is not.

        Not for lanes: it takes some microseconds an op.
        """
        op: IssuedOp | None = None
        while self._on_device and self._on_device[0].ended.query():
            op = self._on_device.popleft()
            lane = op.span.lane
            self.spans.extend(op.spans(self._free_ns.get(lane, 0)))
            self._free_ns[lane] = op.ticket.end_ns
        if op is not None and not self._on_device:
            op.clock.set()

    def last_step(self) -> Trace:
        """Return the spans of the last list that trained: evaluations and flushes may follow it."""
        trained = [span.step for span in self.spans if span.op.kind is OpKind.BACKWARD]
        last = Trace()
        last.spans += [span for span in self.spans if trained and span.step == trained[-1]]
        return last

    def lane_summaries(self) -> dict[str, LaneSummary]:
        return {
            lane: _lane_summary([span for span in self._ops() if span.lane == lane])
            for lane in self._lanes()
        }

    def step_summaries(self) -> list[StepSummary]:
        """Return one summary per list played, in order."""
        steps: dict[int, list[Span]] = {}
        lanes: dict[str, list[Span]] = {}
        for span in self.spans:
            steps.setdefault(span.step, []).append(span)
            lanes.setdefault(span.lane, []).append(span)
        return [_step_summary(steps[step], lanes) for step in sorted(steps)]

    def to_json(self) -> str:
        """Return the trace as Chrome's JSON, which Perfetto opens: one row per lane."""
        return json.dumps({"traceEvents": list(self._events())})

    def write(self, path: Path) -> None:
        """Write the trace as Chrome's JSON."""
        write_file(path, self.to_json().encode(), durable=False)

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


def step_split(trace: Trace, seconds: float, data_seconds: float) -> dict[str, float]:
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


def _extent_s(spans: list[Span]) -> float:
    first = min((span.start_ns for span in spans), default=0)
    return (max((span.end_ns for span in spans), default=0) - first) / 1e9


def _lane_summary(ops: list[Span]) -> LaneSummary:
    return LaneSummary(
        num_ops=len(ops),
        num_bytes=sum(span.num_bytes for span in ops),
        busy_s=sum(span.seconds for span in ops),
    )


def _step_summary(spans: list[Span], lanes: Mapping[str, list[Span]]) -> StepSummary:
    blamed_ns: Counter[OpKind] = Counter()
    computed = [span for span in spans if span.lane == "compute"]
    for span in [*computed, *_tail(spans, computed)]:
        if span.awaited is not None:
            blamed_ns.update(_blame(span, lanes, frozenset()))
    return StepSummary(
        seconds=_extent_s(spans),
        compute_waited_s={kind: wait_ns / 1e9 for kind, wait_ns in blamed_ns.items() if wait_ns},
        host_paced_s=_host_paced_ns(computed) / 1e9,
    )


def _tail(spans: list[Span], computed: list[Span]) -> Iterator[Span]:
    """Yield the time from compute's last op to the end of the step, as a wait for what ended it."""
    ends = [span for span in spans if span.awaited is None and span.op.kind.spec.ends_step]
    last = max(ends, key=lambda span: span.end_ns, default=None)
    if last is not None and computed and last.end_ns > computed[-1].end_ns:
        yield computed[-1]._replace(
            start_ns=computed[-1].end_ns, end_ns=last.end_ns, awaited=last.op
        )


def _host_paced_ns(spans: list[Span]) -> int:
    """Return how long a device has waited for the host in a lane, or may have."""
    found_ns, free_ns = 0, spans[0].start_ns if spans else 0
    for span in spans:
        if span.issued_ns is not None:
            found_ns += span.start_ns - free_ns
            own_ns = span.end_ns - span.start_ns
            if span.end_ns - span.issued_ns[1] < _AT_ONCE * own_ns:
                found_ns += own_ns
        free_ns = span.end_ns
    return found_ns


def _blame(wait: Span, lanes: Mapping[str, list[Span]], asked: frozenset[str]) -> Counter[OpKind]:
    """Return the wait's nanoseconds by root cause.

    It is what the awaited lane did meanwhile: an op may be late because of those before it. If that
    lane waited too, its own wait is followed. Not twice: lanes never wait in a circle, but the
    end of a wait is noted a wake-up late and may overlap with the next.
    """
    assert wait.awaited is not None
    lane = wait.awaited.lane
    blamed: Counter[OpKind] = Counter()
    left_ns = wait.end_ns - wait.start_ns
    if lane not in asked:
        for span in _within(lanes.get(lane, []), wait.start_ns, wait.end_ns):
            if span.awaited is not None:
                blamed.update(_blame(span, lanes, asked | {lane}))
            else:
                blamed[span.op.kind] += span.end_ns - span.start_ns
            left_ns -= span.end_ns - span.start_ns
    blamed[wait.awaited.kind] += left_ns
    return blamed


def _within(spans: list[Span], start_ns: int, end_ns: int) -> Iterator[Span]:
    """Yield the parts of one lane's spans that are between start and end."""
    first = bisect_right(spans, start_ns, key=lambda span: span.end_ns)
    for span in islice(spans, first, None):
        if span.start_ns >= end_ns:
            return
        yield span._replace(start_ns=max(span.start_ns, start_ns), end_ns=min(span.end_ns, end_ns))
