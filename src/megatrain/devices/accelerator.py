"""A device with its own memory and streams, and one that shares the host's memory.

Three lanes have a stream each; what an op queues goes onto its lane's stream, and nothing in here
waits for the device (the staged copies of pinning.py excepted, where there is no other way).

No tensor that the allocator may reuse ever crosses from one stream to another. What crosses lanes
(slots, gradient slots, the outbox, the tape's ring) is allocated once, before the lanes run, and
its use is ordered by the schedule; all that compute makes on the way it uses up on its own stream.
So `record_stream` is not needed, and memory is free when it is dropped.

Where device and host are one memory (`Coherent`: DGX Spark, Strix Halo, MI300A), a copy of weights
into a slot would read and write the memory that compute waits for. So there are no slots, fetches
or stashed inputs: compute reads weights and inputs at their addresses in registered host memory,
which the device has too, and gradients add up where the optimizer reads them. No such machine has
run this yet, only the integrated mode of testkit/host_gpu.

Laws (testkit/simulated)
    1. The bits of the CPU, whatever the streams' timing; no two streams touch a byte unordered.
    2. Between the first ops of a step and its last it allocates nothing but the step's inputs.
    3. No op waits for the device on the host.
    4. A cap and pinned memory end with `close`, also if the device has failed
       (tests/devices/test_accelerator.py).
    5. A thread sets the device before it calls it: lanes, their watchers and the caller's
       (the same, and proofs/null_cuda).
    6. In one memory: the same bits; weights, inputs and gradients are not copied
       (tests/devices/test_coherent.py).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatrain.devices.device import CpuDevice, Device, is_out_of_memory
from megatrain.devices.pinning import (
    PIECE_BYTES,
    RING_BUFFER_BYTES,
    RING_BUFFERS,
    Registry,
    Ring,
    tell_kept,
    tell_refusal,
)
from megatrain.devices.runtime import (
    PINNING_CAUSES,
    PinningFailed,
    Runtime,
    TorchRuntime,
    num_accelerators,
    pci_address,
    why_not_driven,
)
from megatrain.errors import ConfigError, NoDevice, OutOfDeviceMemory
from megatrain.lanes.device_clock import DeviceClock
from megatrain.lanes.lane import Lane, Stream
from megatrain.memory.arena import map_arena
from megatrain.memory.layout import PAGE
from megatrain.memory.ledger import gib
from megatrain.memory.placement import Placement, find_placement
from megatrain.memory.prefault import prefault
from megatrain.step.ops import DEVICE_LANES, LANES
from megatrain.step.settings import DEVICE_PART_ELEMENTS


class NotDriven(UserWarning):
    """The machine has an accelerator that the engine cannot drive."""


class AcceleratorDevice:
    """A GPU, as torch.accelerator drives it."""

    copying = True
    own_memory = True
    answers = True
    part_elements = DEVICE_PART_ELEMENTS

    def __init__(
        self,
        runtime: Runtime,
        name: str = "accelerator",
        /,
        *,
        cap_bytes: int | None = None,
        piece_bytes: int = PIECE_BYTES,
        ring_buffer_bytes: int = RING_BUFFER_BYTES,
    ) -> None:
        """`cap_bytes` keeps the rest of the device for others, until `close`; it holds again
        when memory is asked for again. The sizes are for tests.
        """
        self._runtime = runtime
        self.name = name
        self._registry = Registry(runtime, piece_bytes)
        self._ring_buffer_bytes = ring_buffer_bytes
        self._rings: tuple[Ring, Ring] | None = None
        self._cap_bytes = cap_bytes
        self._is_capped = False
        self._apply_cap()

    @property
    def has_triton(self) -> bool:
        return self._runtime.has_triton

    def groups(self, dtype: torch.dtype) -> bool:
        return self._runtime.groups(dtype)

    @cached_property
    def placement(self) -> Placement:
        """Decided when it is first asked for: after the cores of a host were divided."""
        allocate = self._pinned_arena if self._runtime.allocates else None
        return replace(find_placement(pci_address(self.name)), allocate=allocate)

    @property
    def peak_bytes(self) -> int:
        return self._runtime.peak_bytes()

    @property
    def free_bytes(self) -> int:
        self._apply_cap()
        return self._runtime.free_bytes()

    @property
    def integrated(self) -> bool:
        return self._runtime.integrated

    def cap(self, num_bytes: int) -> None:
        self._cap_bytes = num_bytes if self._cap_bytes is None else min(self._cap_bytes, num_bytes)
        self._is_capped = False
        self._apply_cap()

    def lanes(self) -> list[Lane]:
        place, clock = self.placement, DeviceClock(self._runtime)
        ranges = self._runtime.named_range if os.environ.get("MEGATRAIN_NVTX") else None
        return [
            Lane(
                name,
                stream=self._lane_stream(name),
                clock=clock,
                ranges=ranges,
                cores=place.lane_cores,
                set_device=self._runtime.set_device,
            )
            if name in DEVICE_LANES
            else Lane(
                name,
                ranges=ranges,
                cores=place.update_cores,
                set_device=self._runtime.set_device,
            )
            for name in LANES
        ]

    def role_stream(self, role: str) -> Stream:
        return self._runtime.stream(role, first=True)

    def current_stream(self) -> Stream:
        stream: Stream = self._runtime.current_stream()
        return stream

    def _lane_stream(self, name: str) -> Stream:
        # What little the out lane computes would otherwise wait behind products, and the link too.
        return self._runtime.stream(name, first=name == "out")

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        self._apply_cap()
        try:
            return self._runtime.empty(num_bytes)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfDeviceMemory(
                f"device memory: {purpose} needs {gib(num_bytes)}, {gib(self.free_bytes)} are free",
                self.memory_snapshot(),
            ) from error

    def map_host(self, num_bytes: int, purpose: str) -> Tensor:
        if self._runtime.allocates:
            arena = self._pinned_arena(purpose, num_bytes)
        else:
            arena = map_arena(purpose, num_bytes, self.placement.copied(num_bytes))
        self.pin(purpose, arena)
        return arena

    def _pinned_arena(self, name: str, num_bytes: int) -> Tensor:
        """Return zeros that are pinned from the start, and begin on a page."""
        memory = self._reachable(num_bytes + PAGE, name)
        start = -memory.data_ptr() % PAGE
        return memory[start : start + num_bytes].zero_()

    def unmap_host(self, arena: Tensor) -> None:
        tell_kept(self._registry.unregister(arena))

    def in_place(self, tensor: Tensor) -> Tensor:
        raise AssertionError("weights are copied into slots")

    def pin(self, name: str, arena: Tensor) -> None:
        if self._runtime.allocates and arena.is_pinned():
            self._registry.note(arena)
            return
        prefault(name, arena)
        refusal = self._registry.register(name, arena)
        if refusal is not None:
            self._go_around(name, arena, refusal)

    def _go_around(self, name: str, arena: Tensor, refusal: PinningFailed) -> None:
        """Let copies of memory that was refused go through rings, and warn of it once."""
        if self._rings is None:
            self._rings = self._ring(), self._ring()
            ring_bytes = 2 * RING_BUFFERS * self._ring_buffer_bytes
            tell_refusal(name, arena, refusal, ring_bytes)

    def pinned(self, tensor: Tensor) -> Tensor:
        source = tensor.contiguous()
        return self._like(self._reachable(source.nbytes, "inputs"), source).copy_(source)

    def place(self, tensor: Tensor) -> Tensor:
        placed = self._given(self.pinned(tensor), "the model's buffers")
        self.synchronize()
        return placed

    def counted(self, tensor: Tensor, purpose: str) -> Tensor:
        return tensor

    def copy(self, target: Tensor, source: Tensor) -> None:
        to_device = self._runtime.is_device(target)
        target, source = target.view(torch.uint8), source.view(torch.uint8)
        host = source if to_device else target
        pieces = self._registry.pieces(host)
        assert pieces is not None, "copies need memory that went through `pin`"
        for piece in pieces:
            if not self._registry.was_refused(host[piece]):
                target[piece].copy_(source[piece], non_blocking=True)
                continue
            assert self._rings is not None
            inbound, outbound = self._rings
            if to_device:
                inbound.send(target[piece], source[piece])
            else:
                outbound.receive(target[piece], source[piece])

    def communicate(
        self, reads: Sequence[Tensor], writes: Sequence[Tensor], work: Callable[[], None]
    ) -> None:
        self._runtime.communicate(reads, writes, work)

    def to_device(self, tensor: Tensor) -> Tensor:
        return self._given(tensor, "inputs")

    def to_host(self, tensor: Tensor) -> Tensor:
        source = tensor.detach().contiguous()
        target = self._like(self._reachable(source.nbytes, "results"), source)
        return target.copy_(source, non_blocking=True)

    def read(self, tensor: Tensor) -> Tensor:
        found = self.to_host(tensor)
        self._runtime.current_stream().record_event().synchronize()
        return found

    def seed(self, seed: int) -> None:
        self._runtime.seed(seed)

    def random_state(self) -> list[Tensor]:
        return self._runtime.random_state()

    def set_random_state(self, state: list[Tensor]) -> None:
        self._runtime.set_random_state(state)

    def synchronize(self) -> None:
        self._runtime.synchronize()

    def close(self) -> None:
        """Give host memory back as it was, and lift the cap. The store outlives its engines."""
        try:
            self.synchronize()
        finally:
            self._rings = None
            tell_kept(self._registry.close())
            if self._is_capped:
                self._is_capped = False
                self._runtime.limit(None)

    def memory_snapshot(self) -> Any:
        with suppress(Exception):  # it explains an error, and must not hide it
            return self._runtime.memory_snapshot()
        return None

    def _given(self, tensor: Tensor, purpose: str) -> Tensor:
        placed = self._like(self.allocate(tensor.nbytes, purpose), tensor)
        return placed.copy_(tensor, non_blocking=True)

    def _apply_cap(self) -> None:
        if self._cap_bytes is not None and not self._is_capped:
            self._is_capped = True
            self._runtime.limit(self._cap_bytes)

    def _ring(self) -> Ring:
        size = self._ring_buffer_bytes
        buffers = [self._reachable(size, "a ring of buffers") for _ in range(RING_BUFFERS)]
        return Ring(self._runtime, buffers)

    def _reachable(self, num_bytes: int, purpose: str) -> Tensor:
        """Return a little pinned host memory. Raises OutOfDeviceMemory, naming the purpose."""
        try:
            return self._runtime.pinned(num_bytes)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            text = str(error).partition("\n")[0]
            raise OutOfDeviceMemory(
                f"pinned host memory: {purpose} needs {gib(num_bytes)}, and the driver has none "
                f"({text}). {PINNING_CAUSES}"
            ) from error

    @staticmethod
    def _like(flat: Tensor, tensor: Tensor) -> Tensor:
        return flat.view(tensor.dtype).view(tensor.shape)


class Coherent(AcceleratorDevice):
    """A GPU in one memory with the host, which reads registered host memory where it is."""

    copying = False

    def in_place(self, tensor: Tensor) -> Tensor:
        if not tensor.nbytes:
            return self._like(self._runtime.empty(0), tensor)
        return self._like(self._runtime.shared(tensor.data_ptr(), tensor.nbytes), tensor)

    def _lane_stream(self, name: str) -> Stream:
        # One for all: a gradient that compute has made is written home by the out lane.
        return self._runtime.stream("compute")

    def _go_around(self, name: str, arena: Tensor, refusal: PinningFailed) -> None:
        raise ConfigError(
            f"host memory: {name}, {gib(arena.nbytes)}, cannot be registered ({refusal}), so "
            f"{self.name} cannot read it where it is. {refusal.advice}. Set memory.slots to 2: "
            "weights are then copied"
        )


def accelerator(
    name: str = "",
    *,
    cap_bytes: int | None = None,
    local_rank: int | None = None,
    in_place: bool = True,
) -> AcceleratorDevice:
    """Return torch's accelerator, or the one called `name` (`cuda`, `cuda:1`, `xpu`).

    Where the name has no number, `local_rank` is it: which of the ranks of a host this one is. One
    that shares the host's memory reads weights `in_place`, unless ranks gather them into slots.
    """
    runtime = TorchRuntime.find(name, local_rank)
    shares = in_place and local_rank is None and runtime.integrated
    kind = Coherent if shares else AcceleratorDevice
    return kind(runtime, str(runtime.device), cap_bytes=cap_bytes)


def find_device(
    name: str,
    *,
    cap_bytes: int | None = None,
    local_rank: int | None = None,
    in_place: bool = True,
) -> Device:
    """Return the device called `name`; `auto` is the accelerator if there is one, else the CPU.

    An accelerator that the engine cannot drive is not one for `auto`, which warns of it. A device
    uses at most `cap_bytes` of the accelerator's memory. `local_rank` None: the process is
    alone, and compute on the CPU, or on an accelerator in one memory with the host, reads the
    store. Otherwise, or without `in_place` on an accelerator, weights are copied into slots.
    """
    if name != "cpu":
        try:
            wanted = "" if name == "auto" else name
            return accelerator(
                wanted, cap_bytes=cap_bytes, local_rank=local_rank, in_place=in_place
            )
        except NoDevice:
            if name != "auto" or num_accelerators():
                raise
            if why := why_not_driven():
                warnings.warn(f"{why}. Compute runs on the CPU.", NotDriven, stacklevel=2)
    return CpuDevice(copying=local_rank is not None)
