"""Where the tests of the accelerator run: on a real one, or on one of two that need no hardware.

A rig makes accelerators and knows what differs between them: how work on a stream is delayed, how a
wait of the host for the device is noticed, what memory is in use. Every test is written once, for
all. What the real one cannot tell, the others add. The simulated one: at the end of each run no two
streams may have touched a byte unordered. The one of testkit/host_gpu, which torch itself drives:
no copy made the host wait, and no host memory stays registered.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.runtime import PinningFailed, Runtime, TorchRuntime
from megatrain.engine.updates import Optimizer
from megatrain.lanes.lane import Lane, Stream
from megatrain.memory.store import Store
from megatrain.step.ops import DEVICE_LANES, LANES, Op
from testkit.simulated.accelerator import Policy, Simulator
from testkit.simulated.watched import WatchedOptimizer, watched
from testkit.slow_lane import SlowLane
from testkit.worlds import Case, Outcome, World

SPIN_CYCLES = 2_000_000
"""About a millisecond: longer than any kernel of these tiny models."""


class Rig(Protocol):
    """One accelerator under test."""

    torch_device: torch.device
    """Where the plain model computes the bits that ours must have."""

    @property
    def runtime(self) -> Runtime: ...

    def running(
        self,
        store: Store,
        *,
        seed: int = 0,
        cap_bytes: int | None = None,
        refuses_at: int | None = None,
        **sizes: int,
    ) -> AbstractContextManager[AcceleratorDevice]:
        """Give an accelerator for engines on `store`; its memory counts from zero."""

    def bare(self, **sizes: int) -> AcceleratorDevice:
        """Return an accelerator of which nothing is watched."""

    def optimizer(self, world: World) -> Optimizer:
        """Return an optimizer whose accesses are seen, where they can be."""

    def spin(self, cycles: int) -> None:
        """Keep the stream that this thread has entered busy."""

    def reference_lanes(self) -> Sequence[Lane] | None:
        """Return what the reference needs to compute on the device."""

    def without_waits(self) -> Any:
        """Fail if the host waits for the device inside."""

    def is_pinned(self, tensor: Tensor) -> bool: ...

    def live_bytes(self) -> int: ...

    def peak_bytes(self) -> int:
        """The most that was live at once in this run."""

    def needed_bytes(self) -> int:
        """The least cap that this run would surely have kept to."""


class SimulatedRig:
    """testkit/simulated, a new accelerator for each run."""

    torch_device = torch.device("cpu")
    runtime: Simulator

    def __init__(self, policy: Policy | None = None) -> None:
        self._policy = policy

    @contextmanager
    def running(
        self,
        store: Store,
        *,
        seed: int = 0,
        cap_bytes: int | None = None,
        refuses_at: int | None = None,
        **sizes: int,
    ) -> Iterator[AcceleratorDevice]:
        policies: tuple[Policy, ...] = ("random", "late", "early")
        policy = self._policy or policies[seed % 3]
        self.runtime = Simulator(seed, policy, fails_at_registration=refuses_at)
        with watched(self.runtime):
            yield AcceleratorDevice(self.runtime, cap_bytes=cap_bytes, **sizes)
        assert not self.runtime.races, "\n".join(self.runtime.races[:10])
        assert not self.runtime.failures, repr(self.runtime.failures[:3])

    def bare(self, **sizes: int) -> AcceleratorDevice:
        return AcceleratorDevice(Simulator(), **sizes)

    def optimizer(self, world: World) -> Optimizer:
        return WatchedOptimizer(world.optimizer(), self.runtime)

    def spin(self, cycles: int) -> None:
        """Streams dawdle by themselves here; let the other lanes run ahead."""
        time.sleep(cycles * 1e-10)

    def reference_lanes(self) -> Sequence[Lane]:
        # Memory that an op makes is on the device only in a thread that has entered a stream.
        stream = self.runtime.stream("reference")
        return [Lane(name, stream=stream if name in DEVICE_LANES else None) for name in LANES]

    @contextmanager
    def without_waits(self) -> Iterator[None]:
        before = self.runtime.num_syncs
        yield
        assert self.runtime.num_syncs == before, "called a synchronizing operation"

    def is_pinned(self, tensor: Tensor) -> bool:
        return self.runtime.kind_of(tensor) == "pinned"

    def live_bytes(self) -> int:
        return self.runtime._live_bytes

    def peak_bytes(self) -> int:
        return self.runtime.peak_bytes()

    def needed_bytes(self) -> int:
        return self.runtime.peak_bytes()


class RealRig:
    """torch's accelerator. Its allocator and its cap belong to the process, not to a run."""

    SLACK_BYTES = 64 << 20
    """The cap counts what the allocator holds, in pieces of up to 20 MiB per stream."""

    def __init__(self, runtime: TorchRuntime) -> None:
        self.runtime = runtime
        self.torch_device = runtime.device
        self._module: Any = torch.get_device_module(runtime.device)
        self._first_bytes = 0

    @contextmanager
    def running(
        self,
        store: Store,
        *,
        seed: int = 0,
        cap_bytes: int | None = None,
        refuses_at: int | None = None,
        **sizes: int,
    ) -> Iterator[AcceleratorDevice]:
        self._start_anew()
        runtime: Runtime = self.runtime
        if refuses_at is not None:
            runtime = _Refusing(self.runtime, refuses_at)
        try:
            yield AcceleratorDevice(runtime, cap_bytes=cap_bytes, **sizes)
        finally:
            self.runtime.synchronize()
            self.runtime.limit(torch.accelerator.get_memory_info(self.torch_device)[1])

    def _start_anew(self) -> None:
        self.runtime.synchronize()
        gc.collect()
        if self.torch_device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(self.torch_device)
        self._first_bytes = torch.accelerator.memory_allocated(self.torch_device)

    def bare(self, **sizes: int) -> AcceleratorDevice:
        return AcceleratorDevice(self.runtime, **sizes)

    def optimizer(self, world: World) -> Optimizer:
        return world.optimizer()

    def spin(self, cycles: int) -> None:
        if hasattr(self._module, "_sleep"):
            self._module._sleep(cycles)
            return
        torch.ones(1 << 20, device=self.torch_device).sort()

    def reference_lanes(self) -> None:
        return None

    @contextmanager
    def without_waits(self) -> Iterator[None]:
        if not hasattr(self._module, "set_sync_debug_mode"):
            yield  # torch has this mode for CUDA and ROCm alone
            return
        self._module.set_sync_debug_mode("error")
        try:
            yield
        finally:
            self._module.set_sync_debug_mode("default")

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def live_bytes(self) -> int:
        return torch.accelerator.memory_allocated(self.torch_device) - self._first_bytes

    def peak_bytes(self) -> int:
        return torch.accelerator.max_memory_allocated(self.torch_device) - self._first_bytes

    def needed_bytes(self) -> int:
        return torch.accelerator.max_memory_reserved(self.torch_device) + self.SLACK_BYTES


class HostGpuRig(RealRig):
    """testkit/host_gpu, by torch as a real one; streams work at once, late, or by chance.

    Its second device, because a thread that was not told of a device has the first.
    """

    def __init__(self, timing: int = 0) -> None:
        from testkit.host_gpu import control

        super().__init__(TorchRuntime.find("hostgpu:1"))
        self._control, self._timing = control, timing

    @contextmanager
    def running(
        self,
        store: Store,
        *,
        seed: int = 0,
        cap_bytes: int | None = None,
        refuses_at: int | None = None,
        **sizes: int,
    ) -> Iterator[AcceleratorDevice]:
        control = self._control
        timing = control.TIMINGS[(self._timing + seed) % 3]
        before = control.counters()["silent_waits"], control.registered_bytes()
        with (
            super().running(
                store, seed=seed, cap_bytes=cap_bytes, refuses_at=refuses_at, **sizes
            ) as accelerator,
            control.timed(timing),
        ):
            yield accelerator
        silent_waits = control.counters()["silent_waits"] - before[0]
        assert not silent_waits, f"{silent_waits} copies of memory that is not pinned"
        left = control.registered_bytes() - before[1]
        assert not left, f"{left} bytes of host memory stay registered"


class _Refusing:
    """A runtime that pins so much host memory, and no more."""

    def __init__(self, runtime: TorchRuntime, refuses_at: int) -> None:
        self._runtime, self._left = runtime, refuses_at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def register(self, address: int, num_bytes: int) -> None:
        self._left -= 1
        if self._left == 0:
            raise PinningFailed("the rig was told to refuse")
        self._runtime.register(address, num_bytes)


def _dawdling(source: random.Random) -> Callable[[Op], float]:
    """Return a delay of the host's lane: none, or 0.2 ms."""
    return lambda op: source.choice((0.0, 2e-4))


def delayed_lanes(
    rig: Rig, seed: int, change: Callable[[str, Stream], Stream] = lambda _, stream: stream
) -> list[SlowLane]:
    """Return lanes whose streams, and sometimes threads, dawdle before ops, each in its own way."""
    source = random.Random(seed)

    def delay(how_often: float, dawdles: random.Random) -> Callable[[Op], float]:
        def before(op: Op) -> float:
            if dawdles.random() < how_often:
                rig.spin(dawdles.randrange(SPIN_CYCLES))
            return dawdles.choice((0.0, 0.0, 2e-4))

        return before

    lanes = []
    for name in LANES:
        how_often = source.choice((0.0, 0.3, 0.3, 1.0))
        dawdles = random.Random(source.random())
        if name not in DEVICE_LANES:
            dawdling = SlowLane(name, delay=_dawdling(dawdles), set_device=rig.runtime.set_device)
            lanes.append(dawdling)
            continue
        stream = change(name, rig.runtime.stream())
        lanes.append(
            SlowLane(
                name,
                stream=stream,
                delay=delay(how_often, dawdles),
                set_device=rig.runtime.set_device,
            )
        )
    return lanes


def play(
    rig: Rig, world: World, case: Case, accelerator: AcceleratorDevice, **changes: Any
) -> Outcome:
    """Return what a case gives on the accelerator: on lanes, unless `changes` say otherwise."""
    settings: dict[str, Any] = {"device": accelerator, "lanes": None}
    if case.update != "none":
        settings["optimizer"] = rig.optimizer(world)
    if changes.get("reference"):
        settings["lanes"] = rig.reference_lanes()
    return world.play(case, **settings | changes)
