"""A simulated accelerator: ordinary CPU memory behind megatrain.devices.runtime.Runtime.

Memory is told apart by address: device, pinned, or plain. In a thread that has entered a stream,
every op on device memory is queued on that stream instead of done, and done later, in an order
that respects only the order within streams and the events between them:

    late     when something waits for it, and only what that needs
    early    at once: how a fast device often looks, and how races hide
    random   at any time in between, by the seed

Fresh and freed device memory is full of NaN. Every access, by streams and by host threads, is held
against all others by vector clocks (clocks.py). Memory that is dropped while a stream other than
the one it was allocated on may still use it is a race too: a caching allocator would hand it out
again. What a real device could not do is an AssertionError: an op on host memory, a copy across two
registered pieces, a copy that changes the dtype on its way.

A collective may tell, by what its work returns, whether the other ranks have come to it. Until they
have its stream stands still, and nothing else does.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from megatrain.devices.runtime import PinningFailed
from testkit.simulated.clocks import Clock, History, merge
from testkit.simulated.dispatch import Mode
from testkit.simulated.timeline import SimTimedEvent, Timeline

Policy = Literal["late", "early", "random"]
MEET_S = 120.0
"""So long a rank waits for the others."""


class Region:
    """One allocation."""

    def __init__(self, base: Tensor, kind: str, owner: SimStream | None, name: str) -> None:
        self.base = base
        """All its bytes, by a storage of our own: what queued work uses."""
        self.start, self.stop = base.data_ptr(), base.data_ptr() + base.nbytes
        self.kind, self.owner = kind, owner
        self.history = History(name)
        self.recorded: set[str] = set()
        """Streams that the allocator was told of."""
        self._typed: dict[tuple[torch.dtype, int], Tensor] = {}

    def alias(self, tensor: Tensor) -> Tensor:
        """Return the tensor by our own storage."""
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        first = tensor.data_ptr() - self.start
        size = tensor.element_size()
        shift = first % size
        typed = self._typed.get((tensor.dtype, shift))
        if typed is None:
            whole = (self.base.nbytes - shift) // size * size
            typed = self.base[shift : shift + whole].view(tensor.dtype)
            self._typed[tensor.dtype, shift] = typed
        return typed.as_strided(tensor.shape, tensor.stride(), first // size)


Access = tuple[Tensor, Region | None]
"""A tensor, and the memory it lies in."""


class Bypass(threading.local):
    """What this thread does inside is done at once, unseen."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1


class Task:
    """One piece of work on a stream."""

    __slots__ = ("done", "met", "needs", "stream", "what", "work")

    def __init__(
        self,
        stream: SimStream,
        work: Callable[[], object] | None = None,
        needs: Task | None = None,
        what: str = "",
    ) -> None:
        self.stream, self.work, self.needs, self.what = stream, work, needs, what
        self.done = False
        self.met: Callable[[], bool] | None = None
        """Of a collective that was begun: whether all ranks have come to it."""


class SimEvent:
    """Fits megatrain.lanes.progress.Event."""

    def __init__(self, simulator: Simulator, task: Task, clock: Clock) -> None:
        self._simulator, self.task, self.clock = simulator, task, clock
        self.at_s = task.stream.timeline.now()

    def query(self) -> bool:
        self._simulator.require_device("asks an event")
        return self._simulator.poll(self)

    def synchronize(self) -> None:
        if self._simulator.entered is None:  # a thread that waits in place of others
            self._simulator.await_poll(self)
            return
        self._simulator.num_syncs += 1
        self._simulator.await_event(self)


class SimStream:
    """Fits megatrain.lanes.lane.Stream."""

    def __init__(self, simulator: Simulator, name: str) -> None:
        self.simulator, self.name = simulator, name
        self.queue: deque[Task] = deque()
        self.clock: Clock = {name: 0}
        self.timeline = Timeline()
        self._entered = threading.local()
        """Where each thread that has entered it returns to."""

    def record_event(self) -> SimEvent:
        return self.simulator.record(self)

    def wait_event(self, event: SimEvent) -> None:
        self.simulator.wait(self, event)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def sleep(self, seconds: float) -> None:
        """Do nothing for so long, before what is queued next."""
        self.timeline.sleep(seconds)

    def __enter__(self) -> SimStream:
        mode = Mode(self.simulator)
        vars(self._entered).setdefault("modes", []).append((self.simulator.entered, mode))
        self.simulator.entered = self
        mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        before, mode = self._entered.modes.pop()
        mode.__exit__(None, None, None)
        self.simulator.entered = before


class Simulator:
    """The accelerator: a Runtime, and what was seen of its use."""

    def __init__(
        self,
        seed: int = 0,
        policy: Policy = "random",
        *,
        fails_at_allocation: int | None = None,
        fails_at_registration: int | None = None,
        registers: bool = True,
        integrated: bool = False,
        meet_s: float = MEET_S,
    ) -> None:
        """`integrated`: the host's memory is also the device's; `meet_s`: how long a rank waits."""
        self._meet_s = meet_s
        self._random, self._policy = random.Random(seed), policy
        self.lock = threading.RLock()
        self.bypassed = Bypass()
        self._local = threading.local()
        self._regions: dict[int, Region] = {}
        self._starts: list[int] = []
        self._names = itertools.count()
        self._streams: dict[str, SimStream] = {}
        self._host_clocks: dict[int, Clock] = {}
        self._registered: dict[int, int] = {}
        self._fails_at_allocation = fails_at_allocation
        self.fails_at_registration = fails_at_registration
        self._registers = registers
        self.integrated = integrated
        self._cap_bytes: int | None = None
        self._live_bytes = self._peak_bytes = 0
        self.races: list[str] = []
        self.ranges: list[str] = []
        """What threads said that they were at."""
        self.failures: list[BaseException] = []
        """What queued work raised: indices out of poisoned memory, for instance."""
        self.num_syncs = self.num_tasks = self.num_allocations = self.num_registrations = 0
        self.registered_bytes = 0
        self.default = self.stream("default")
        self.set_device()

    # The runtime.

    has_triton = False

    def set_device(self) -> None:
        self._local.has_device = True

    def require_device(self, what: str) -> None:
        """Note a call of a thread that never set the device: it would go to another one."""
        if not getattr(self._local, "has_device", False):
            thread = threading.current_thread().name
            self.races.append(f"{thread} {what} and never set the device")

    def stream(self, name: str = "", *, first: bool = False) -> SimStream:
        """Return a new stream, or the one of a name: one queue and one clock, as on CUDA."""
        with self.lock:
            name = name or f"stream {len(self._streams)}"
            if name not in self._streams:
                self._streams[name] = SimStream(self, name)
            return self._streams[name]

    def current_stream(self) -> SimStream:
        return self.entered or self.default

    def timed_event(self) -> SimTimedEvent:
        return SimTimedEvent()

    def named_range(self, name: str) -> AbstractContextManager[object]:
        self.ranges.append(name)
        return nullcontext()

    def empty(self, num_bytes: int) -> Tensor:
        with self.lock, self.bypassed:
            return self.allocate((num_bytes,), (1,), torch.uint8)

    def pinned(self, num_bytes: int) -> Tensor:
        with self.lock, self.bypassed:
            return self._make(num_bytes, "pinned", None)

    def is_device(self, tensor: Tensor) -> bool:
        return self.kind_of(tensor) == "device"

    @property
    def allocates(self) -> bool:
        return False

    def register(self, address: int, num_bytes: int) -> None:
        with self.lock:
            self.num_registrations += 1
            if not self._registers or self.num_registrations == self.fails_at_registration:
                raise PinningFailed("the simulator was told to refuse")
            for start, stop in self._registered.items():
                assert address >= stop or address + num_bytes <= start, "registered twice"
            self._registered[address] = address + num_bytes
            self.registered_bytes += num_bytes

    def is_registered(self, host: Tensor) -> bool:
        """Return whether copies from or to host memory may go on beside the host."""
        low, high = extent(host)
        for start, stop in self._registered.items():
            if start <= low < stop:
                assert high <= stop, "a copy across two registered pieces"
                return True
        return False

    def unregister(self, address: int) -> None:
        with self.lock:
            self.registered_bytes -= self._registered.pop(address) - address

    def shared(self, address: int, num_bytes: int) -> Tensor:
        raise AssertionError("it has its own memory")

    def communicate(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Callable[[], None]
    ) -> None:
        def access(tensor: Tensor) -> Access:
            region = self.region_of(tensor)
            assert region is not None
            assert region.kind == "device", "a collective needs device memory"
            return tensor, region

        with self.lock:
            found = [access(tensor) for tensor in reads], [access(tensor) for tensor in writes]

        self.launch(self.current_stream(), "collective", *found, work)

    def limit(self, num_bytes: int | None) -> None:
        self._cap_bytes = num_bytes

    # Queued work that draws borrows the generator, in whatever thread it is done: under the lock.

    def groups(self, dtype: torch.dtype) -> bool:
        return True

    def seed(self, seed: int) -> None:
        with self.lock:
            torch.default_generator.manual_seed(seed)

    def random_state(self) -> list[Tensor]:
        with self.lock:
            return [torch.get_rng_state()]

    def set_random_state(self, state: list[Tensor]) -> None:
        with self.lock:
            torch.set_rng_state(state[0])

    def synchronize(self) -> None:
        for stream in list(self._streams.values()):
            self.await_event(self.record(stream))

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def free_bytes(self) -> int:
        return (self._cap_bytes or 1 << 40) - self._live_bytes

    def memory_snapshot(self) -> dict[str, Any]:
        regions = [region for region in self._regions.values() if region.kind == "device"]
        return {"segments": [{"total_size": region.base.nbytes} for region in regions]}

    # Order.

    @property
    def entered(self) -> SimStream | None:
        return getattr(self._local, "stream", None)

    @entered.setter
    def entered(self, stream: SimStream | None) -> None:
        self._local.stream = stream

    def host_clock(self) -> Clock:
        ident = threading.get_ident()
        return self._host_clocks.setdefault(ident, {f"thread {ident}": 1})

    def published(self) -> Clock:
        """Return what this thread has seen: whoever hears of it has seen that too."""
        with self.lock:
            return dict(self.host_clock())

    def hear(self, clock: Clock) -> None:
        with self.lock:
            merge(self.host_clock(), clock)

    def thread_ended(self, ident: int) -> None:
        """This thread has joined that one."""
        with self.lock:
            merge(self.host_clock(), self._host_clocks.get(ident, {}))

    def record(self, stream: SimStream) -> SimEvent:
        with self.lock:
            merge(stream.clock, self.host_clock())
            return SimEvent(self, self._push(Task(stream)), dict(stream.clock))

    def wait(self, stream: SimStream, event: SimEvent) -> None:
        with self.lock:
            merge(stream.clock, event.clock)
            stream.timeline.follow(event.at_s)
            self._push(Task(stream, needs=event.task))

    def await_event(self, event: SimEvent) -> None:
        begin = time.monotonic()
        while not self._is_done(event):
            assert time.monotonic() < begin + self._meet_s, "no other rank comes"
            time.sleep(0.001)

    def await_poll(self, event: SimEvent) -> None:
        """Wait as one who looks now and then would: the streams take their time."""
        begin = time.monotonic()
        while not self.poll(event):
            assert time.monotonic() < begin + self._meet_s, "no other rank comes"
            time.sleep(0.0002)

    def _is_done(self, event: SimEvent) -> bool:
        with self.lock:
            if time.perf_counter() < event.at_s or not self._run_until(event.task):
                return False
            merge(self.host_clock(), event.clock)
            return True

    def poll(self, event: SimEvent) -> bool:
        with self.lock:
            if self._policy == "random" and self._random.random() < 0.5:
                self._run_some()
            else:
                self._run_until(event.task)
            done = event.task.done and time.perf_counter() >= event.at_s
            if done:
                merge(self.host_clock(), event.clock)
            return done

    def touch(self, tensor: Tensor, *, writes: bool, what: str) -> None:
        """Note that this host thread reads or writes memory that a device may use too."""
        with self.lock:
            clock, actor = self.host_clock(), f"thread {threading.get_ident()}"
            clock[actor] += 1
            self._note((tensor, self.region_of(tensor)), actor, clock, what, writes=writes)

    def watch(self, name: str, arena: Tensor) -> None:
        """Note accesses to an arena of the host."""
        with self.lock:
            self._add(Region(arena, "host", None, name))

    def record_stream(self, tensor: Tensor, stream: SimStream) -> None:
        """Tell the allocator that a stream uses memory that was allocated on another."""
        region = self.region_of(tensor)
        assert region is not None
        region.recorded.add(stream.name)

    # Memory.

    def _make(self, num_bytes: int, kind: str, owner: SimStream | None) -> Tensor:
        base = torch.full((max(num_bytes, 1),), 0xFF, dtype=torch.uint8)
        region = Region(base, kind, owner, f"{kind} memory {next(self._names)}")
        # A second storage over the same bytes: it dies when the program under test drops it.
        given = torch.from_numpy(base.numpy())
        self._add(region)
        weakref.finalize(given.untyped_storage(), self._free, region)
        return given[:num_bytes]

    def allocate(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        num = (
            sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
            if 0 not in shape
            else 0
        )
        num_bytes = num * dtype.itemsize
        self.num_allocations += 1
        full = self._cap_bytes is not None and self._live_bytes + num_bytes > self._cap_bytes
        if full or self.num_allocations == self._fails_at_allocation:
            raise torch.OutOfMemoryError(f"simulated: {num_bytes} bytes")
        self._live_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        flat = self._make(num_bytes, "device", self.current_stream())
        if dtype is torch.bool:
            flat.fill_(1)
        return flat.view(dtype).as_strided(shape, strides)

    def _add(self, region: Region) -> None:
        self._regions[region.start] = region
        bisect.insort(self._starts, region.start)

    def _free(self, region: Region) -> None:
        with self.lock:
            if self._regions.get(region.start) is not region:
                return
            del self._regions[region.start]
            del self._starts[bisect.bisect_left(self._starts, region.start)]
            owner = region.owner
            if owner is None:
                return
            self._live_bytes -= region.base.nbytes
            seen = dict(owner.clock)
            merge(seen, self.host_clock())
            for access in region.history.unseen(seen, {owner.name} | region.recorded):
                self.races.append(f"{region.history.name} is freed while in use: {access}")
            owner.queue.append(Task(owner, functools.partial(region.base.fill_, 0xFF)))

    def region_of(self, tensor: Tensor) -> Region | None:
        if tensor.device.type != "cpu":
            return None
        pointer = tensor.untyped_storage().data_ptr() if tensor.numel() == 0 else tensor.data_ptr()
        number = bisect.bisect_right(self._starts, pointer) - 1
        if number < 0:
            return None
        region = self._regions[self._starts[number]]
        return region if pointer < region.stop else None

    def kind_of(self, tensor: Tensor) -> str | None:
        with self.lock:
            region = self.region_of(tensor)
            return None if region is None else region.kind

    def _note(self, access: Access, actor: str, clock: Clock, what: str, *, writes: bool) -> None:
        tensor, region = access
        if region is not None and tensor.numel():
            span = extent(tensor)
            self.races += region.history.touch(span, actor, clock, what, writes=writes)

    # Work.

    def launch(
        self,
        stream: SimStream,
        what: str,
        reads: Iterable[Access],
        writes: Iterable[Access],
        work: Callable[[], object] | None,
    ) -> None:
        with self.lock:
            merge(stream.clock, self.host_clock())
            stream.clock[stream.name] += 1
            for access in reads:
                self._note(access, stream.name, stream.clock, what, writes=False)
            for access in writes:
                self._note(access, stream.name, stream.clock, what, writes=True)
            if work is not None:
                self._push(Task(stream, work, what=what))

    def _push(self, task: Task) -> Task:
        task.stream.queue.append(task)
        if self._policy == "early":
            while any(s.queue and self._run_first(s) for s in self._streams.values()):
                pass
        elif self._policy == "random":
            self._run_some()
        return task

    def _run_some(self) -> None:
        for _ in range(self._random.choice((0, 0, 0, 1, 2, 5))):
            waiting = [stream for stream in self._streams.values() if stream.queue]
            if waiting:
                self._run_first(self._random.choice(waiting))

    def _run_first(self, stream: SimStream) -> bool:
        """Do the first work of a stream; return whether it is done."""
        task = stream.queue[0]
        if task.needs is not None and not task.needs.done:
            return False
        if task.work is not None:
            work, task.work = task.work, None
            with self.bypassed, torch._C._AutoDispatchBelowAutograd(), torch.no_grad():
                try:
                    met = work()
                    task.met = met if callable(met) else None
                except Exception as error:
                    error.add_note(f"in {task.what}")
                    self.failures.append(error)
        if task.met is not None and not task.met():
            return False
        stream.queue.popleft()
        self.num_tasks += 1
        task.done, task.needs, task.met = True, None, None
        return True

    def _run_until(self, task: Task) -> bool:
        """Do what `task` needs, and then that; return whether it is done."""
        while not task.done:
            needs = task.stream.queue[0].needs
            if needs is not None and not self._run_until(needs):
                return False
            if not self._run_first(task.stream):
                return False
        return True


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses between which a tensor that is not empty lies."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return start, start + span * tensor.element_size()
