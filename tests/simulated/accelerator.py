"""A simulated accelerator: ordinary CPU memory behind megatrain.pipeline.runtime.Runtime.

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
"""

from __future__ import annotations

import bisect
import functools
import itertools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatrain.pipeline.runtime import PinningFailed
from tests.simulated.clocks import Clock, History, merge

aten = torch.ops.aten
Policy = Literal["late", "early", "random"]
_FRESH = aten.lift_fresh.default
"""What torch.tensor(...) ends with: a view by its schema, though nothing on a device holds it."""
SYNCHRONISING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}


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


class Task:
    """One piece of work on a stream."""

    __slots__ = ("done", "needs", "stream", "what", "work")

    def __init__(
        self,
        stream: SimStream,
        work: Callable[[], object] | None = None,
        needs: Task | None = None,
        what: str = "",
    ) -> None:
        self.stream, self.work, self.needs, self.what = stream, work, needs, what
        self.done = False


class SimEvent:
    """Fits megatrain.pipeline.lane_progress.Event."""

    def __init__(self, simulator: Simulator, task: Task, clock: Clock) -> None:
        self._simulator, self.task, self.clock = simulator, task, clock

    def query(self) -> bool:
        return self._simulator.poll(self)

    def synchronize(self) -> None:
        self._simulator.num_syncs += 1
        self._simulator.await_event(self)


class SimStream:
    """Fits megatrain.pipeline.lanes.Stream."""

    def __init__(self, simulator: Simulator, name: str) -> None:
        self.simulator, self.name = simulator, name
        self.queue: deque[Task] = deque()
        self.clock: Clock = {name: 0}
        self._modes: list[tuple[SimStream | None, _Mode]] = []

    def record_event(self) -> SimEvent:
        return self.simulator.record(self)

    def wait_event(self, event: SimEvent) -> None:
        self.simulator.wait(self, event)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def __enter__(self) -> SimStream:
        mode = _Mode(self.simulator)
        self._modes.append((self.simulator.entered, mode))
        self.simulator.entered = self
        mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        before, mode = self._modes.pop()
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
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
    ) -> None:
        self._random, self._policy = random.Random(seed), policy
        self._lock = threading.RLock()
        self._local = threading.local()
        self._regions: dict[int, Region] = {}
        self._starts: list[int] = []
        self._names = itertools.count()
        self._streams: list[SimStream] = []
        self._host_clocks: dict[int, Clock] = {}
        self._registered: dict[int, int] = {}
        self._fails_at_allocation = fails_at_allocation
        self.fails_at_registration = fails_at_registration
        self._registers = registers
        self._cap_bytes: int | None = None
        self._live_bytes = self._peak_bytes = 0
        self.races: list[str] = []
        self.failures: list[BaseException] = []
        """What queued work raised: indices out of poisoned memory, for instance."""
        self.num_syncs = self.num_tasks = self.num_allocations = self.num_registrations = 0
        self.registered_bytes = 0
        self.default = self.stream("default")

    # The runtime.

    def stream(self, name: str = "") -> SimStream:
        with self._lock:
            made = SimStream(self, name or f"stream {len(self._streams)}")
            self._streams.append(made)
            return made

    def current_stream(self) -> SimStream:
        return self.entered or self.default

    def empty(self, num_bytes: int) -> Tensor:
        with self._lock, self.bypassed():
            return self._allocate((num_bytes,), (1,), torch.uint8)

    def pinned(self, num_bytes: int) -> Tensor:
        with self._lock, self.bypassed():
            return self._make(num_bytes, "pinned", None)

    def is_device(self, tensor: Tensor) -> bool:
        return self._kind(tensor) == "device"

    def register(self, address: int, num_bytes: int) -> None:
        with self._lock:
            self.num_registrations += 1
            if not self._registers or self.num_registrations == self.fails_at_registration:
                raise PinningFailed("the simulator was told to refuse")
            for start, stop in self._registered.items():
                assert address >= stop or address + num_bytes <= start, "registered twice"
            self._registered[address] = address + num_bytes
            self.registered_bytes += num_bytes

    def unregister(self, address: int) -> None:
        with self._lock:
            self.registered_bytes -= self._registered.pop(address) - address

    def limit(self, num_bytes: int) -> None:
        self._cap_bytes = num_bytes

    # Queued work that draws borrows the generator, in whatever thread it is done: under the lock.

    def seed(self, seed: int) -> None:
        with self._lock:
            torch.default_generator.manual_seed(seed)

    def random_state(self) -> list[Tensor]:
        with self._lock:
            return [torch.get_rng_state()]

    def set_random_state(self, state: list[Tensor]) -> None:
        with self._lock:
            torch.set_rng_state(state[0])

    def synchronize(self) -> None:
        with self._lock:
            for stream in list(self._streams):
                self.await_event(self.record(stream))

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def free_bytes(self) -> int:
        return (self._cap_bytes or 1 << 40) - self._live_bytes

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
        with self._lock:
            return dict(self.host_clock())

    def hear(self, clock: Clock) -> None:
        with self._lock:
            merge(self.host_clock(), clock)

    def thread_ended(self, ident: int) -> None:
        """This thread has joined that one."""
        with self._lock:
            merge(self.host_clock(), self._host_clocks.get(ident, {}))

    def record(self, stream: SimStream) -> SimEvent:
        with self._lock:
            merge(stream.clock, self.host_clock())
            return SimEvent(self, self._push(Task(stream)), dict(stream.clock))

    def wait(self, stream: SimStream, event: SimEvent) -> None:
        with self._lock:
            merge(stream.clock, event.clock)
            self._push(Task(stream, needs=event.task))

    def await_event(self, event: SimEvent) -> None:
        with self._lock:
            self._run_until(event.task)
            merge(self.host_clock(), event.clock)

    def poll(self, event: SimEvent) -> bool:
        with self._lock:
            if self._policy == "random" and self._random.random() < 0.5:
                self._run_some()
            else:
                self._run_until(event.task)
            if event.task.done:
                merge(self.host_clock(), event.clock)
            return event.task.done

    def touch(self, tensor: Tensor, *, writes: bool, what: str) -> None:
        """Note that this host thread reads or writes memory that a device may use too."""
        with self._lock:
            clock, actor = self.host_clock(), f"thread {threading.get_ident()}"
            clock[actor] += 1
            self._note(tensor, actor, clock, what, writes=writes)

    def watch(self, name: str, arena: Tensor) -> None:
        """Note accesses to an arena of the host."""
        with self._lock:
            self._add(Region(arena, "host", None, name))

    def record_stream(self, tensor: Tensor, stream: SimStream) -> None:
        """Tell the allocator that a stream uses memory that was allocated on another."""
        region = self._region(tensor)
        assert region is not None
        region.recorded.add(stream.name)

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Do what follows at once, unseen."""
        before = getattr(self._local, "bypassed", False)
        self._local.bypassed = True
        try:
            yield
        finally:
            self._local.bypassed = before

    @property
    def is_bypassed(self) -> bool:
        return getattr(self._local, "bypassed", False)

    # Memory.

    def _make(self, num_bytes: int, kind: str, owner: SimStream | None) -> Tensor:
        base = torch.full((max(num_bytes, 1),), 0xFF, dtype=torch.uint8)
        region = Region(base, kind, owner, f"{kind} memory {next(self._names)}")
        # A second storage over the same bytes: it dies when the program under test drops it.
        given = torch.from_numpy(base.numpy())
        self._add(region)
        weakref.finalize(given.untyped_storage(), self._free, region)
        return given[:num_bytes]

    def _allocate(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
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
        with self._lock:
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

    def _region(self, tensor: Tensor) -> Region | None:
        if tensor.device.type != "cpu":
            return None
        pointer = tensor.untyped_storage().data_ptr() if tensor.numel() == 0 else tensor.data_ptr()
        number = bisect.bisect_right(self._starts, pointer) - 1
        if number < 0:
            return None
        region = self._regions[self._starts[number]]
        return region if pointer < region.stop else None

    def _kind(self, tensor: Tensor) -> str | None:
        with self._lock:
            region = self._region(tensor)
            return None if region is None else region.kind

    def _note(self, tensor: Tensor, actor: str, clock: Clock, what: str, *, writes: bool) -> None:
        region = self._region(tensor)
        if region is not None and tensor.numel():
            span = _extent(tensor)
            self.races += region.history.touch(span, actor, clock, what, writes=writes)

    # Work.

    def launch(
        self,
        stream: SimStream,
        what: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        work: Callable[[], object] | None,
    ) -> None:
        with self._lock:
            merge(stream.clock, self.host_clock())
            stream.clock[stream.name] += 1
            for tensor in reads:
                self._note(tensor, stream.name, stream.clock, what, writes=False)
            for tensor in writes:
                self._note(tensor, stream.name, stream.clock, what, writes=True)
            if work is not None:
                self._push(Task(stream, work, what=what))

    def _push(self, task: Task) -> Task:
        task.stream.queue.append(task)
        if self._policy == "early":
            while any(stream.queue and self._run_first(stream) for stream in self._streams):
                pass
        elif self._policy == "random":
            self._run_some()
        return task

    def _run_some(self) -> None:
        for _ in range(self._random.choice((0, 0, 0, 1, 2, 5))):
            waiting = [stream for stream in self._streams if stream.queue]
            if waiting:
                self._run_first(self._random.choice(waiting))

    def _run_first(self, stream: SimStream) -> bool:
        task = stream.queue[0]
        if task.needs is not None and not task.needs.done:
            return False
        stream.queue.popleft()
        self.num_tasks += 1
        if task.work is not None:
            with self.bypassed(), torch._C._AutoDispatchBelowAutograd(), torch.no_grad():
                try:
                    task.work()
                except Exception as error:
                    error.add_note(f"in {task.what}")
                    self.failures.append(error)
        task.done, task.work, task.needs = True, None, None
        return True

    def _run_until(self, task: Task) -> None:
        while not task.done:
            first = task.stream.queue[0]
            if first.needs is not None and not first.needs.done:
                self._run_until(first.needs)
            self._run_first(task.stream)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends every op of this thread to the simulator."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._simulator = simulator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._simulator.is_bypassed or (_is_view(func) and func is not _FRESH):
            return func(*args, **kwargs)
        return _Dispatch(self._simulator, func, args, kwargs).run()


class _Dispatch:
    """One op in a thread that has entered a stream."""

    def __init__(self, simulator: Simulator, func: Any, args: Any, kwargs: Any) -> None:
        self.simulator, self.func, self.args, self.kwargs = simulator, func, args, kwargs
        self.flat, self.spec = tree_flatten((args, kwargs))
        self.stream = simulator.current_stream()
        self.name = func._schema.name.removeprefix("aten::")

    def run(self) -> Any:
        func, simulator = self.func, self.simulator
        tensors = [value for value in self.flat if isinstance(value, Tensor)]
        kinds = [simulator._kind(tensor) for tensor in tensors]
        device = self.kwargs.get("device")
        if (device is not None and torch.device(device).type == "meta") or any(
            tensor.device.type == "meta" for tensor in tensors
        ):
            return func(*self.args, **self.kwargs)
        in_lane = self.stream is not simulator.default
        if func is _FRESH and kinds == [None] and in_lane:
            return self._given()
        if "device" not in kinds:
            if tensors or not in_lane:
                return self._on_host(tensors)
            return self._queued()
        if func is aten.copy_.default:
            return self._copied(*kinds)
        for tensor, kind in zip(tensors, kinds, strict=True):
            assert kind == "device" or tensor.dim() == 0, (
                f"{self.name}: a host tensor {tuple(tensor.shape)} meets device memory"
            )
        return self._asked(tensors) if self._asks() else self._queued()

    def _on_host(self, tensors: list[Tensor]) -> Any:
        written = {id(tensor) for tensor in self._written()}
        for tensor in tensors:
            self.simulator.touch(tensor, writes=id(tensor) in written, what=self.name)
        return self.func(*self.args, **self.kwargs)

    def _given(self) -> Tensor:
        """torch.tensor(...) on a device: a copy from pageable memory, which the host waits for."""
        source = self.args[0]
        self.stream.synchronize()
        with self.simulator._lock, self.simulator.bypassed():
            target = self.simulator._allocate(source.shape, source.stride(), source.dtype)
            target.copy_(source)
        return target

    def _copied(self, target_kind: str | None, source_kind: str | None) -> Tensor:
        target: Tensor = self.args[0]
        source: Tensor = self.args[1]
        if "device" in (target_kind, source_kind) and target_kind != source_kind:
            assert target.dtype is source.dtype, "a copy that changes the dtype on its way"
            host = source if target_kind == "device" else target
            blocks = not (len(self.args) > 2 and self.args[2]) and not self.kwargs.get(
                "non_blocking"
            )
            pageable = not self._is_pinned(host)
            self._queue([source], [target])
            if (host.dim() > 0 and (blocks or pageable)) or pageable:
                self.stream.synchronize()
            return target
        self._queued()
        return target

    def _is_pinned(self, host: Tensor) -> bool:
        simulator = self.simulator
        if simulator._kind(host) == "pinned" or host.numel() == 0:
            return True
        low, high = _extent(host)
        for start, stop in simulator._registered.items():
            if start <= low < stop:
                assert high <= stop, "a copy across two registered pieces"
                return True
        return False

    def _asks(self) -> bool:
        if self.func in SYNCHRONISING:
            return True
        if self.func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            indices = self.args[1]
            return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        return False

    def _asked(self, tensors: list[Tensor]) -> Any:
        """The host must know: all that is queued here is done first."""
        self.simulator.launch(self.stream, self.name, tensors, self._written(), None)
        self.stream.synchronize()
        with self.simulator._lock, self.simulator.bypassed():
            outs, spec = tree_flatten(self.func(*self.args, **self.kwargs))
            for number, out in enumerate(outs):
                if isinstance(out, Tensor) and self.simulator._kind(out) != "device":
                    made = self.simulator._allocate(out.shape, out.stride(), out.dtype)
                    outs[number] = made.copy_(out)
        return tree_unflatten(outs, spec)

    def _queued(self) -> Any:
        written = self._written()
        if written:
            read = [t for t in self.flat if isinstance(t, Tensor)]
            self._queue(read, written)
            return written[0] if len(self.func._schema.returns) == 1 else tuple(written)
        outs, spec = self._outputs()
        results = [out for out in outs if isinstance(out, Tensor)]
        self._queue([t for t in self.flat if isinstance(t, Tensor)], results, outs)
        return tree_unflatten(outs, spec)

    def _queue(
        self, reads: list[Tensor], writes: list[Tensor], outs: list[Any] | None = None
    ) -> None:
        func, simulator = self.func, self.simulator
        args, kwargs = tree_unflatten([self._alias(value) for value in self.flat], self.spec)
        with simulator._lock:
            state = _drawn_state(func, args, kwargs)
        aliases = [self._alias(out) for out in outs or []]

        def work() -> None:
            if state is not None:
                after = torch.get_rng_state()
                torch.set_rng_state(state)
            result = func(*args, **kwargs)
            if state is not None:
                torch.set_rng_state(after)
            for alias, value in zip(
                aliases, tree_flatten(result)[0] if aliases else (), strict=True
            ):
                if isinstance(alias, Tensor):
                    alias.copy_(value)

        empty = outs is not None and func in (
            aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default,
            aten.new_empty.default, aten.new_empty_strided.default,
        )  # fmt: skip
        if not empty:
            simulator.launch(self.stream, self.name, reads, writes, work)

    def _alias(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with self.simulator._lock, self.simulator.bypassed():
            region = self.simulator._region(value)
            if region is None:  # a scalar of the host, or pageable memory: read now
                return value.detach().clone()
            return region.alias(value)

    def _written(self) -> list[Tensor]:
        found: list[Tensor] = []
        for number, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = (
                self.kwargs.get(argument.name)
                if argument.kwarg_only or number >= len(self.args)
                else self.args[number]
            )
            found += [tensor for tensor in tree_flatten(value)[0] if isinstance(tensor, Tensor)]
        return found

    def _outputs(self) -> tuple[list[Any], Any]:
        """Return fresh memory in the form of the op's results."""
        with self.simulator._lock, self.simulator.bypassed():
            forms, spec = _forms(self.func, self.flat, self.spec)
            outs = [
                self.simulator._allocate(*form) if isinstance(form, tuple) else form
                for form in forms
            ]
        return outs, spec


_known_forms: dict[Any, tuple[list[Any], Any]] = {}


def _forms(func: Any, flat: list[Any], spec: Any) -> tuple[list[Any], Any]:
    """Return shape, strides and dtype of each result.

    By trying it on other values: the meta device knows some results (of layer norm in bf16, say) in
    another dtype than the CPU makes them.
    """
    key = (
        func,
        tuple(
            (tuple(v.shape), v.stride(), v.dtype, v.dim() == 0)
            if isinstance(v, Tensor)
            else repr(v)
            for v in flat
        ),
    )
    if key not in _known_forms:
        args, kwargs = tree_unflatten([_dummy(value) for value in flat], spec)
        state = torch.get_rng_state()
        outs, out_spec = tree_flatten(func(*args, **kwargs))
        torch.set_rng_state(state)
        _known_forms[key] = (
            [(o.shape, o.stride(), o.dtype) if isinstance(o, Tensor) else o for o in outs],
            out_spec,
        )
    return _known_forms[key]


def _drawn_state(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return the generator's state for an op that draws, and let the generator go on as it will."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    if func in (aten._scaled_dot_product_flash_attention_for_cpu.default,):
        return None
    state = torch.get_rng_state()
    flat, spec = tree_flatten((args, kwargs))
    drawn_args, drawn_kwargs = tree_unflatten([_dummy(value) for value in flat], spec)
    func(*drawn_args, **drawn_kwargs)
    return state


def _dummy(value: Any) -> Any:
    """Return a tensor like `value` that is in range as an index and as a probability."""
    if not isinstance(value, Tensor):
        return value
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return fresh.fill_(0.5 if value.is_floating_point() else 0)


@functools.cache
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(
        out.alias_info is not None and not out.alias_info.is_write for out in returns
    )


def _extent(tensor: Tensor) -> tuple[int, int]:
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()
