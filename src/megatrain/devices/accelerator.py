"""A device with its own memory and streams.

Three lanes have a stream each; what an op queues goes onto its lane's stream, and nothing in here
waits for the device (the staged copies of pinning.py excepted, where there is no other way).

No tensor that the allocator may reuse ever crosses from one stream to another. What crosses lanes
(slots, gradient slots, the outbox, the tape's ring) is allocated once, before the lanes run, and
its use is ordered by the schedule; all that compute makes on the way it uses up on its own stream.
So `record_stream` is not needed, and memory is free when it is dropped.

Laws (testkit/simulated)
    1. The bits of the CPU, whatever the streams' timing; no two streams touch a byte unordered.
    2. Between the first ops of a step and its last it allocates nothing but the step's inputs.
    3. No op waits for the device on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.devices.device import CpuDevice, Device
from megatrain.devices.pinning import PIECE_BYTES, RING_BUFFER_BYTES, Registry, Ring, tell
from megatrain.devices.runtime import PinningFailed, Runtime, TorchRuntime
from megatrain.errors import DeviceFull, NoDevice
from megatrain.lanes.lane import Lane
from megatrain.memory.arena import map_arena
from megatrain.memory.ledger import gib
from megatrain.step.ops import DEVICE_LANES, LANES
from megatrain.step.settings import DEVICE_PART_ELEMENTS


class Accelerator:
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
        """`cap_bytes` keeps the rest of the device for others; the sizes are for tests."""
        self._runtime, self.name = runtime, name
        self._registry = Registry(runtime, piece_bytes)
        self._ring_buffer_bytes = ring_buffer_bytes
        self._rings: tuple[Ring, Ring] | None = None
        if cap_bytes is not None:
            runtime.limit(cap_bytes)

    @property
    def peak_bytes(self) -> int:
        return self._runtime.peak_bytes()

    @property
    def free_bytes(self) -> int:
        return self._runtime.free_bytes()

    def lanes(self) -> list[Lane]:
        return [
            Lane(name, stream=self._runtime.stream() if name in DEVICE_LANES else None)
            for name in LANES
        ]

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        try:
            return self._runtime.empty(num_bytes)
        except torch.OutOfMemoryError as error:
            raise DeviceFull(
                f"device memory: {purpose} needs {gib(num_bytes)}, {gib(self.free_bytes)} are free"
            ) from error

    def map_host(self, num_bytes: int, purpose: str) -> Tensor:
        arena = map_arena(purpose, num_bytes)
        self.pin(purpose, arena)
        return arena

    def unmap_host(self, arena: Tensor) -> None:
        self._registry.unregister(arena)

    def pin(self, name: str, arena: Tensor) -> None:
        try:
            self._registry.register(arena)
        except PinningFailed as error:
            first = self._rings is None
            self._rings = self._rings or (self._ring(), self._ring())
            if first:
                tell(name, arena, error, sum(ring.num_bytes for ring in self._rings))

    def pinned(self, tensor: Tensor) -> Tensor:
        source = tensor.contiguous()
        copy = self._like(self._runtime.pinned(source.nbytes), source)
        return copy.copy_(source)

    def place(self, tensor: Tensor) -> Tensor:
        placed = self._given(self.pinned(tensor), "the model's buffers")
        self.synchronize()
        return placed

    def counted(self, tensor: Tensor, purpose: str) -> Tensor:
        return tensor

    def copy(self, target: Tensor, source: Tensor) -> None:
        to_device = self._runtime.is_device(target)
        target, source = target.view(torch.uint8), source.view(torch.uint8)
        pieces = self._registry.pieces(source if to_device else target)
        if pieces is not None:
            for piece in pieces:
                target[piece].copy_(source[piece], non_blocking=True)
            return
        assert self._rings is not None, "copies need memory that went through `pin`"
        inbound, outbound = self._rings
        if to_device:
            inbound.send(target, source)
        else:
            outbound.receive(target, source)

    def to_device(self, tensor: Tensor) -> Tensor:
        return self._given(tensor, "inputs")

    def to_host(self, tensor: Tensor) -> Tensor:
        source = tensor.detach().contiguous()
        return self._like(self._runtime.pinned(source.nbytes), source).copy_(
            source, non_blocking=True
        )

    def seed(self, seed: int) -> None:
        self._runtime.seed(seed)

    def random_state(self) -> list[Tensor]:
        return self._runtime.random_state()

    def set_random_state(self, state: list[Tensor]) -> None:
        self._runtime.set_random_state(state)

    def synchronize(self) -> None:
        self._runtime.synchronize()

    def close(self) -> None:
        """Give host memory back as it was. The store outlives its engines."""
        self.synchronize()
        self._registry.close()

    def _given(self, tensor: Tensor, purpose: str) -> Tensor:
        placed = self._like(self.allocate(tensor.nbytes, purpose), tensor)
        return placed.copy_(tensor, non_blocking=True)

    def _ring(self) -> Ring:
        return Ring(self._runtime, self._ring_buffer_bytes)

    @staticmethod
    def _like(flat: Tensor, tensor: Tensor) -> Tensor:
        return flat.view(tensor.dtype).view(tensor.shape)


def accelerator(name: str = "", *, cap_bytes: int | None = None) -> Accelerator:
    """Return torch's accelerator, or the one called `name` (`cuda`, `cuda:1`, `xpu`)."""
    runtime = TorchRuntime.find(name)
    return Accelerator(runtime, str(runtime.device), cap_bytes=cap_bytes)


def find_device(name: str, *, cap_bytes: int | None = None) -> Device:
    """Return the device called `name`; `auto` is the accelerator if there is one, else the CPU.

    It uses at most `cap_bytes` of the accelerator's memory.
    """
    if name == "cpu":
        return CpuDevice()
    try:
        return accelerator("" if name == "auto" else name, cap_bytes=cap_bytes)
    except NoDevice:
        if name != "auto":
            raise
        return CpuDevice()
