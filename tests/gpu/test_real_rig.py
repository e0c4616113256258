"""The code for real hardware, run without any: torch's calls land in stubs with their signatures.

Memory is the host's, and work is done when it is queued. That shows nothing about a device; it
shows that the runtime and the rig call what torch has, as torch has it, and clean up after
themselves. So what fails on hardware first is about the hardware.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatrain.devices.runtime import PinningFailed, TorchRuntime
from megatrain.errors import NoDevice
from testkit.states import steps_of
from testkit.worlds import Case, world_of
from tests.gpu.rigs import RealRig, delayed_lanes, play

DEVICE = torch.device("cuda", 0)
GIB = 1 << 30
CASE = Case(sort="llama of 2 layers", steps=steps_of(2)[:2], update="late", tape="host")


class Stream:
    """Fits lanes.Stream; all its work is done."""

    def record_event(self) -> Any:
        return SimpleNamespace(query=lambda: True, synchronize=lambda: None)

    def wait_event(self, event: object) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


class BorrowedRuntime(TorchRuntime):
    """torch's runtime but for what needs a driver: memory and streams."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._addresses: set[int] = set()

    def stream(self, name: str = "", *, first: bool = False) -> Stream:
        return Stream()

    def current_stream(self) -> Any:
        return Stream()

    def empty(self, num_bytes: int) -> Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._addresses.add(memory.untyped_storage().data_ptr())
        return memory

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def is_device(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._addresses


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, mock.Mock]:
    """Stubs of all that is called of torch, by name."""
    stubs: dict[str, mock.Mock] = {}

    def stub(owner: Any, name: str, result: Any = None, *, checked: bool = True) -> None:
        original = getattr(owner, name) if checked else None
        stubs[name] = (
            mock.create_autospec(original, return_value=result)
            if callable(original)
            else mock.Mock(return_value=result)
        )
        monkeypatch.setattr(owner, name, stubs[name], raising=checked)

    accelerator = torch.accelerator
    stub(accelerator, "current_accelerator", torch.device("cuda"))
    stub(accelerator, "current_device_index", 0)
    stub(accelerator, "device_count", 1)
    stub(accelerator, "set_device_index")
    stub(accelerator, "synchronize")
    stub(accelerator, "get_memory_info", (3 * GIB, 4 * GIB))
    stub(accelerator, "memory_allocated", GIB)
    stub(accelerator, "memory_reserved", GIB + 100)
    stub(accelerator, "device_index", nullcontext())
    stub(accelerator, "max_memory_allocated", 2 * GIB)
    stub(accelerator, "max_memory_reserved", 2 * GIB)
    stub(accelerator, "empty_cache")
    stub(accelerator, "reset_peak_memory_stats")
    stub(torch.cuda, "manual_seed")
    stub(torch.cuda, "get_device_properties", SimpleNamespace(is_integrated=False))
    stub(torch.cuda, "get_rng_state", torch.zeros(1))
    stub(torch.cuda, "set_rng_state")
    stub(torch.cuda, "set_per_process_memory_fraction")
    stub(torch.cuda, "set_sync_debug_mode")
    stub(torch.cuda, "_sleep")
    # torch without CUDA has no such function.
    stub(torch._C, "_cuda_clearCublasWorkspaces", checked=False)
    driver = SimpleNamespace(
        cudaHostRegister=mock.Mock(return_value=0),
        cudaHostUnregister=mock.Mock(return_value=0),
        cudaGetErrorString=mock.Mock(return_value="out of memory"),
        cudaGetLastError=mock.Mock(return_value=2),
    )
    stub(torch._C, "_accelerator_setAllocatorSettings", checked=False)
    stub(torch.cuda, "cudart", driver)
    return stubs | vars(driver)


def test_a_run_on_lanes_and_its_reference(calls: dict[str, mock.Mock]) -> None:
    rig, world = RealRig(BorrowedRuntime.find("cuda")), world_of(CASE.sort)
    with rig.running(world.store) as accelerator:
        expected = play(rig, world, CASE, accelerator, reference=True)
    with rig.running(world.store, cap_bytes=GIB) as accelerator:
        with rig.without_waits():
            lanes = delayed_lanes(rig, 5)
            outcome = play(rig, world, CASE, accelerator, lanes=lanes)
        assert rig.live_bytes() == 0
        assert rig.peak_bytes() == GIB
        assert rig.needed_bytes() > 2 * GIB
        assert accelerator.peak_bytes == 2 * GIB
    assert outcome.differences(expected) == []
    assert outcome.differences(world.play(CASE, reference=True)) == [], "the bits of the CPU"
    assert calls["_sleep"].called
    assert [c.args for c in calls["set_sync_debug_mode"].mock_calls] == [("error",), ("default",)]
    fractions = [c.args for c in calls["set_per_process_memory_fraction"].mock_calls]
    assert fractions == [(1.0, DEVICE), (0.25, DEVICE), (1.0, DEVICE), (1.0, DEVICE)]
    registered = sorted(c.args[0] for c in calls["cudaHostRegister"].mock_calls)
    unregistered = sorted(c.args[0] for c in calls["cudaHostUnregister"].mock_calls)
    assert registered == unregistered != []


def test_refused_registration_is_told_and_staged(calls: dict[str, mock.Mock]) -> None:
    rig, world = RealRig(BorrowedRuntime.find()), world_of(CASE.sort)
    with (
        rig.running(world.store, refuses_at=2, ring_buffer_bytes=1000) as accelerator,
        pytest.warns(UserWarning, match=r"can be pinned \(the rig was told to refuse\)"),
    ):
        outcome = play(rig, world, CASE, accelerator)
    assert outcome.differences(world.play(CASE, reference=True)) == []


def test_the_driver_is_asked_and_believed(calls: dict[str, mock.Mock]) -> None:
    runtime = BorrowedRuntime.find("cuda:0")
    assert runtime.device == DEVICE
    runtime.register(4096, 100)
    calls["cudaHostRegister"].assert_called_with(4096, 100, 0)
    calls["cudaHostRegister"].return_value = 2
    with pytest.raises(PinningFailed, match=r"cudaHostRegister: out of memory \(error 2\)"):
        runtime.register(4096, 100)
    assert runtime.free_bytes() == 3 * GIB + 100, "with what the allocator keeps"
    runtime.limit(GIB + 100)
    assert runtime.free_bytes() == 100, "what the cap leaves, not what the device has"
    runtime.seed(5)
    calls["manual_seed"].assert_called_with(5)


def test_no_accelerator_is_said(calls: dict[str, mock.Mock]) -> None:
    calls["current_accelerator"].return_value = None
    with pytest.raises(NoDevice, match=r"finds no accelerator on this machine"):
        TorchRuntime.find("cuda")
