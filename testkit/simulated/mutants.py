"""Every wait, record and synchronize of device and lane code, taken away or moved, one at a time.

A mutant is a function with one text in it replaced. It is compiled in its own module's namespace
and put in the place of the original for the time of a test. `sites` finds by the syntax tree where
such calls are; each of them must be named by a mutant, so that a new one cannot be forgotten.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

CALLS = {
    "wait_event", "record_event", "record_stream", "synchronize", "await_issued", "await_complete",
    "query", "issue", "is_issued", "is_complete", "wait_for", "_wait", "_await", "_reap",
}  # fmt: skip
MODULES = (
    "lanes.lane", "lanes.progress", "lanes.player", "lanes.reference", "devices.pinning",
    "devices.accelerator", "engine.engine", "engine.gradients.outbox", "engine.pages",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """`new` in place of `old` in a function; `what` says it in words."""

    where: str
    """package.module.Class.function, of megatrain."""
    what: str
    old: str
    new: str
    call: str
    """Which of CALLS it is about."""
    scene: str = "late"
    """The one of test_mutants.SCENES that finds it."""
    equivalent: str = ""
    """Why no test can notice, if none can."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"megatrain.{name}")


def sites() -> Counter[tuple[str, str]]:
    """Return how often each function calls each of CALLS."""
    found: Counter[tuple[str, str]] = Counter()
    for name in MODULES:
        tree = ast.parse(inspect.getsource(module_of(name)))
        for holder in ast.walk(tree):
            if not isinstance(holder, ast.ClassDef):
                continue
            for function in holder.body:
                if isinstance(function, ast.FunctionDef):
                    where = f"{name}.{holder.name}.{function.name}"
                    for node in ast.walk(function):
                        if not isinstance(node, ast.Attribute) or node.attr not in CALLS:
                            continue
                        # Engine.synchronize is a method of the engine: its player does the waiting.
                        if (holder.name, ast.unparse(node)) != ("Engine", "self.synchronize"):
                            found[where, node.attr] += 1
    return found


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Put the mutant in the original's place."""
    module_name, class_name, function_name = mutant.where.rsplit(".", 2)
    module = module_of(module_name)
    holder = getattr(module, class_name)
    source = textwrap.dedent(inspect.getsource(getattr(holder, function_name)))
    assert source.count(mutant.old) == 1, f"{mutant.where}: {source.count(mutant.old)} times"
    changed = source.replace(mutant.old, mutant.new)
    space: dict[str, Any] = {}
    code = compile("from __future__ import annotations\n" + changed, mutant.where, "exec")
    exec(code, module.__dict__, space)
    with mock.patch.object(holder, function_name, space[function_name]):
        yield


NOT_WAITS = {
    ("lanes.progress.Progress.issue", "is_issued"): "wakes who can go on; a sleeper looks again by "
    "its deadline at the latest (tests/lanes/test_progress.py)",
    ("lanes.progress.Progress._time_left", "_reap"): "looks whether the device has moved before "
    "the deadline is told (the same)",
    ("lanes.progress.Progress.wake", "_reap"): "wakes who can go on, and they look again",
    ("lanes.progress.Progress._is_passed", "is_issued"): "who asks knows that it is; one that did "
    "not would be stuck, and named, not turn in a loop",
    ("lanes.progress._Watcher._run", "query"): "looks before it takes the lock to wake who waits, "
    "and they look again",
}
"""Sites of CALLS that order nothing, and what they are for."""

MUTANTS = [
    # lanes: what a lane does before and after an op
    Mutant(
        where="lanes.lane.Lane._perform",
        what="an op waits for nothing",
        old="self._wait(work, awaited)",
        new="pass",
        call="_wait",
    ),
    Mutant(
        where="lanes.lane.Lane._perform",
        what="an op waits after it has run",
        old="""    for awaited in work.waits:
        self._wait(work, awaited)
    at.awaited, at.since = None, time.monotonic()
    begun = self._mark()
    start_ns = time.perf_counter_ns()
    num_bytes = self.act(op, work.action)
""",
        new="""    at.awaited, at.since = None, time.monotonic()
    begun = self._mark()
    start_ns = time.perf_counter_ns()
    num_bytes = self.act(op, work.action)
    for awaited in work.waits:
        self._wait(work, awaited)
""",
        call="_wait",
    ),
    Mutant(
        where="lanes.lane.Lane._perform",
        what="no event is recorded",
        old="ticket.event = self._stream.record_event()",
        new="pass",
        call="record_event",
    ),
    Mutant(
        where="lanes.lane.Lane._perform",
        what="the event is recorded before the op",
        old="""    num_bytes = self.act(op, work.action)
    ended = self._mark()
    if self._stream is not None:
        ticket.event = self._stream.record_event()
""",
        new="""    if self._stream is not None:
        ticket.event = self._stream.record_event()
    num_bytes = self.act(op, work.action)
    ended = self._mark()
""",
        call="record_event",
    ),
    Mutant(
        where="lanes.lane.Lane._perform",
        what="an op is never said to be issued",
        old="self._progress.issue(ticket)",
        new="pass",
        call="issue",
    ),
    Mutant(
        where="lanes.lane.Lane._perform",
        what="an op is said to be issued before it is",
        old="    num_bytes = self.act(op, work.action)\n",
        new="    self._progress.issue(ticket)\n    num_bytes = self.act(op, work.action)\n",
        call="issue",
    ),
    Mutant(
        where="lanes.lane.Lane._wait",
        what="a host op waits until it is issued, not until it is done",
        old="progress.is_complete(awaited) if on_host else progress.is_issued(awaited)",
        new="progress.is_issued(awaited)",
        call="is_complete",
        scene="a slow host",
    ),
    Mutant(
        where="lanes.lane.Lane._wait",
        what="a host op that must wait waits until it is issued, not until it is done",
        old="(progress.await_complete if on_host else progress.await_issued)(awaited)",
        new="progress.await_issued(awaited)",
        call="await_complete",
    ),
    Mutant(
        where="lanes.lane.Lane._wait",
        what="a device op does not wait until what it needs is issued",
        old="(progress.await_complete if on_host else progress.await_issued)(awaited)",
        new="on_host and progress.await_complete(awaited)",
        call="await_issued",
    ),
    Mutant(
        where="lanes.lane.Lane._wait",
        what="what it needs always counts as issued",
        old="else progress.is_issued(awaited)",
        new="else True",
        call="is_issued",
    ),
    Mutant(
        where="lanes.lane.Lane._wait",
        what="its stream does not wait",
        old="self._stream.wait_event(awaited.event)",
        new="pass",
        call="wait_event",
    ),
    # lane_progress: what issued and complete mean
    Mutant(
        where="lanes.progress.Progress.is_complete",
        what="what is not issued may count as complete",
        old="if not self.is_issued(ticket):",
        new="if False:",
        call="is_issued",
    ),
    Mutant(
        where="lanes.progress.Progress.is_complete",
        what="what is issued counts as complete",
        old="return self._is_passed(ticket)",
        new="return True",
        call="_reap",
        scene="a slow host",
    ),
    Mutant(
        where="lanes.progress.Progress.await_issued",
        what="no look before sleeping",
        old="    if self.is_issued(ticket):\n        return\n",
        new="",
        call="is_issued",
        equivalent="the loop looks again, with the lock held, before it sleeps: this look only "
        "spares the lock",
    ),
    Mutant(
        where="lanes.progress.Progress.await_issued",
        what="no sleep",
        old="self._sleep(ticket, self.is_issued)",
        new="pass",
        call="_sleep",
    ),
    Mutant(
        where="lanes.progress.Progress.await_complete",
        what="complete without being issued",
        old="self.await_issued(ticket)",
        new="pass",
        call="await_issued",
    ),
    Mutant(
        where="lanes.progress.Progress.await_complete",
        what="issued is enough",
        old="while not self.is_complete(ticket):",
        new="while False:",
        call="is_complete",
    ),
    Mutant(
        where="lanes.progress.Progress._reap",
        what="the device has always done it",
        old="on_device[0].event.query()",
        new="True",
        call="query",
    ),
    # gradients: two streams, and two halves of the outbox
    Mutant(
        where="engine.gradients.outbox.Outbox.begin",
        what="sums are cast before they are whole",
        old="self._begun = self._device.current_stream().record_event()",
        new="pass",
        call="record_event",
    ),
    Mutant(
        where="engine.gradients.outbox.Outbox.send",
        what="a half is cast into under its copy",
        old="self._copied[self._turn] = self._device.current_stream().record_event()",
        new="pass",
        call="record_event",
    ),
    Mutant(
        where="engine.gradients.outbox.Outbox._cast",
        what="casts wait for nothing",
        old="self._casts.wait_event(event)",
        new="pass",
        call="wait_event",
    ),
    Mutant(
        where="engine.gradients.outbox.Outbox._cast",
        what="a half is copied before it is cast",
        old="self._device.current_stream().wait_event(cast)",
        new="pass",
        call="wait_event",
    ),
    Mutant(
        where="engine.gradients.outbox.Outbox._cast",
        what="the cast is called done before it is queued",
        old="    _fill(piece, total)\n        cast = self._casts.record_event()",
        new="    cast = self._casts.record_event()\n        _fill(piece, total)",
        call="record_event",
    ),
    # pages of experts: a stream that fills page slots, and two for their gradients
    Mutant(
        where="engine.pages.PageRing.take",
        what="a page is read before it is there",
        old="self._device.current_stream().wait_event(page.copied)",
        new="pass",
        call="wait_event",
        scene="pages",
    ),
    Mutant(
        where="engine.pages.PageRing.release",
        what="nobody knows when a page was read",
        old="self._read[self._taken] = self._device.current_stream().record_event()",
        new="pass",
        call="record_event",
        scene="pages",
    ),
    Mutant(
        where="engine.pages.PageRing.end",
        what="an op is done before a page that it fetched in vain",
        old="self._device.current_stream().wait_event(self._last)",
        new="pass",
        call="wait_event",
        equivalent="the layers of these scenes use the last page that they fetch; of one that does "
        "not come to its experts, an update would change a page under its copy",
    ),
    Mutant(
        where="engine.pages.PageRing._fill",
        what="a page slot is filled while it is read",
        old="self._copies.wait_event(read)",
        new="pass",
        call="wait_event",
        scene="pages",
    ),
    Mutant(
        where="engine.pages.PageRing._fill",
        what="the copy of a page is called done before it is queued",
        old="""            self.num_bytes += self._load(key, self._slots[slot])
            self._last = self._copies.record_event()""",
        new="""            self._last = self._copies.record_event()
            self.num_bytes += self._load(key, self._slots[slot])""",
        call="record_event",
        scene="pages",
    ),
    Mutant(
        where="devices.accelerator.AcceleratorDevice.read",
        what="the host reads the sizes of groups before they are there",
        old="self._runtime.current_stream().record_event().synchronize()",
        new="pass",
        call="synchronize",
        scene="pages",
    ),
    Mutant(
        where="devices.accelerator.AcceleratorDevice.read",
        what="the host waits for what was queued before the sizes of groups",
        old="""    found = self.to_host(tensor)
    self._runtime.current_stream().record_event().synchronize()""",
        new="""    event = self._runtime.current_stream().record_event()
    found = self.to_host(tensor)
    event.synchronize()""",
        call="record_event",
        scene="pages",
    ),
    # player: what its caller waits for
    Mutant(
        where="lanes.player.OnLanes.wait",
        what="the caller of a step does not wait",
        old="self._player.wait_for(",
        new="list(",
        call="wait_for",
    ),
    Mutant(
        where="lanes.player.Player.play",
        what="the deadline starts anew though work is under way",
        old="all([self._progress.is_complete(ticket) for ticket in self._last.values()])",
        new="True",
        call="is_complete",
        equivalent="only places a deadline off, by one list at most",
    ),
    Mutant(
        where="lanes.player.Player.wait_for",
        what="issued is enough for the caller",
        old="self._progress.await_complete(ticket)",
        new="self._progress.await_issued(ticket)",
        call="await_complete",
    ),
    Mutant(
        where="lanes.player.Player.settle",
        what="settle does not wait",
        old="self.wait_for(self._last.values())",
        new="pass",
        call="wait_for",
        scene="weights are read",
    ),
    # pinning: the staged copies
    Mutant(
        where="devices.pinning.Ring.send",
        what="no event behind a staged copy to the device",
        old="self._events[number] = self._runtime.current_stream().record_event()",
        new="pass",
        call="record_event",
        scene="staged",
    ),
    Mutant(
        where="devices.pinning.Ring.send",
        what="the event is recorded before the staged copy",
        old="""            target[span].copy_(buffer, non_blocking=True)
            self._events[number] = self._runtime.current_stream().record_event()
""",
        new="""            self._events[number] = self._runtime.current_stream().record_event()
            target[span].copy_(buffer, non_blocking=True)
""",
        call="record_event",
        scene="staged",
    ),
    Mutant(
        where="devices.pinning.Ring.receive",
        what="no event behind a staged copy to the host",
        old="self._events[number] = self._runtime.current_stream().record_event()",
        new="pass",
        call="record_event",
        scene="staged",
    ),
    Mutant(
        where="devices.pinning.Ring.receive",
        what="the event is recorded before the staged copy",
        old="""            buffer.copy_(source[span], non_blocking=True)
            self._events[number] = self._runtime.current_stream().record_event()
""",
        new="""            self._events[number] = self._runtime.current_stream().record_event()
            buffer.copy_(source[span], non_blocking=True)
""",
        call="record_event",
        scene="staged",
    ),
    Mutant(
        where="devices.pinning.Ring._next",
        what="a buffer is used again at once",
        old="self._await(number)",
        new="pass",
        call="_await",
        scene="staged",
    ),
    Mutant(
        where="devices.pinning.Ring._unload",
        what="the host reads a buffer at once",
        old="self._await(number)",
        new="pass",
        call="_await",
        scene="staged",
    ),
    Mutant(
        where="devices.pinning.Ring._await",
        what="nobody waits for a staged copy",
        old="event.synchronize()",
        new="pass",
        call="synchronize",
        scene="staged",
    ),
    # accelerator
    Mutant(
        where="devices.accelerator.AcceleratorDevice.place",
        what="what is placed may still be on its way",
        old="self.synchronize()",
        new="pass",
        call="synchronize",
    ),
    Mutant(
        where="devices.accelerator.AcceleratorDevice.close",
        what="memory is unpinned under a copy",
        old="self.synchronize()",
        new="pass",
        call="synchronize",
        scene="a closed device",
    ),
    Mutant(
        where="devices.accelerator.AcceleratorDevice.synchronize",
        what="synchronize does nothing",
        old="self._runtime.synchronize()",
        new="pass",
        call="synchronize",
        scene="a closed device",
    ),
    # engine
    Mutant(
        where="engine.engine.Engine._guarded",
        what="a failed step leaves work on the device",
        old="self.device.synchronize()",
        new="pass",
        call="synchronize",
        scene="a failed step",
    ),
    Mutant(
        where="lanes.reference.Reference.play",
        what="the reference plays on before an op is done",
        old="self._synchronize()",
        new="pass",
        call="_synchronize",
        scene="by the reference",
    ),
]
