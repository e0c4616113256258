"""What `auto` means on this machine: decided once, printed, and written to the run folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatrain.config import Config
from megatrain.devices.accelerator import Accelerator
from megatrain.devices.device import CpuDevice, Device
from megatrain.devices.runtime import TorchRuntime
from megatrain.errors import NoDevice
from megatrain.losses.head import CHUNK_TOKENS

MICRO_BATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Every setting that may be `auto`, decided."""

    device: str
    micro_batch_tokens: int
    slots: int
    tape: Literal["device", "host"]
    update: Literal["in_backward", "late"]
    chunk_tokens: int
    gather_embedding: bool

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def open_device(config: Config) -> tuple[Device, str]:
    """Return the device that the config asks for, or the best there is, and its name."""
    cap = None if config.memory.vram == "auto" else config.memory.vram
    return device_called(config.memory.device, cap)


def device_called(wanted: str, cap: int | None = None) -> tuple[Device, str]:
    """Return a device and its name; `auto` is the accelerator if there is one, else the CPU.

    `cap` are the bytes of its memory to use at most.
    """
    if wanted == "cpu":
        return CpuDevice(), "cpu"
    try:
        runtime = TorchRuntime.find("" if wanted == "auto" else wanted)
    except NoDevice:
        if wanted != "auto":
            raise
        return CpuDevice(), "cpu"
    return Accelerator(runtime, cap_bytes=cap), str(runtime.device)


def resolve(config: Config, device: Device, name: str) -> Resolved:
    """Return what the run will use. Without a plan these are simple rules, not a search."""
    train, memory = config.train, config.memory
    usual = max(config.data.max_length, min(config.step_tokens, MICRO_BATCH_TOKENS))
    micro = usual if isinstance(train.micro_batch_tokens, str) else train.micro_batch_tokens
    return Resolved(
        device=name,
        micro_batch_tokens=micro,
        slots=2 if memory.slots == "auto" else memory.slots,
        tape=memory.tape if memory.tape != "auto" else "host" if device.own_memory else "device",
        update="in_backward" if train.max_grad_norm is None else "late",
        chunk_tokens=CHUNK_TOKENS if memory.chunk_tokens == "auto" else memory.chunk_tokens,
        gather_embedding=memory.gather_embedding is True,
    )
