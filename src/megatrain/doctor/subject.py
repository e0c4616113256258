"""The subject of a measurement: torch's accelerator, the one with a given name, or the processor.

A subject makes devices: a measurement takes a new one and closes it, so that none finds memory that
another has pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.device import CpuDevice, Device
from megatrain.devices.runtime import Runtime, TorchRuntime
from megatrain.errors import NoDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One accelerator, or the processor."""

    name: str
    """For people; empty for the processor."""
    place: torch.device
    """The torch device that computes on it."""
    device_bytes: int
    """Its free memory; 0 where that is the host's."""
    runtime: Runtime | None
    """None: the processor, which makes copies as an accelerator would."""

    def new_device(self, cap_bytes: int | None = None, **sizes: int) -> Device:
        """Return a device that is not in use. `sizes` are those of AcceleratorDevice, for tests."""
        if self.runtime is None:
            return CpuDevice(copying=True, cap_bytes=cap_bytes)
        return AcceleratorDevice(self.runtime, str(self.place), cap_bytes=cap_bytes, **sizes)

    @property
    def new_stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """A context that a thread enters so that its copies have their own stream."""
        return nullcontext if self.runtime is None else self.runtime.stream


def find_subject(name: str = "auto", number: int | None = None, *, needed: bool = False) -> Subject:
    """Return the subject called `name`; `auto`: torch's accelerator, or the CPU if there is none.

    `number` chooses among several accelerators. Raises NoDevice, for `auto` where one is `needed`.
    """
    if name == "cpu":
        return CPU
    try:
        runtime = TorchRuntime.find("" if name == "auto" else name)
    except NoDevice:
        if needed or name != "auto":
            raise
        return CPU
    if number is not None:
        runtime = TorchRuntime.find(f"{runtime.device.type}:{number}")
    return subject_of(runtime)


def subject_of(runtime: TorchRuntime) -> Subject:
    """Return the accelerator that `runtime` drives."""
    return Subject(
        name=str(torch.get_device_module(runtime.device).get_device_name(runtime.device)),
        place=runtime.device,
        device_bytes=runtime.free_bytes(),
        runtime=runtime,
    )


CPU = Subject(name="", place=torch.device("cpu"), device_bytes=0, runtime=None)
