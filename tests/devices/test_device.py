"""The device: memory is counted while it is used, a cap is a law, copies are exact."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatrain.devices.device import CpuDevice, Meter, copy_bits
from megatrain.errors import OutOfDeviceMemory
from testkit.patience import HANG_S


def test_memory_is_counted_until_nothing_uses_it() -> None:
    device = CpuDevice()
    buffer = device.allocate(1000, "weight slots")
    assert buffer.dtype is torch.uint8
    assert device.meter.live_bytes == 1000
    floats = buffer.view(torch.float32)[:10]
    del buffer
    assert device.meter.live_bytes == 1000  # the view still uses all of it
    del floats
    assert (device.meter.live_bytes, device.meter.peak_bytes) == (0, 1000)


HOLDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda hidden: hidden.view(5, 5),
    "detached": lambda hidden: hidden.detach(),
    "graph": lambda hidden: (hidden * hidden).sum(),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_whatever_holds_the_memory_keeps_it_counted(holder: str) -> None:
    device = CpuDevice()
    hidden = device.counted(torch.ones(25, requires_grad=True), "hidden states")
    held = HOLDERS[holder](hidden)
    del hidden
    assert device.meter.live_bytes == 100
    del held
    assert device.meter.live_bytes == 0


def test_what_exceeds_the_cap_is_refused_by_purpose_and_not_counted() -> None:
    device = CpuDevice(cap_bytes=3 << 20)
    held = device.allocate(2 << 20, "weight slots")
    with pytest.raises(
        OutOfDeviceMemory,
        match=r"^device memory: tape needs 1\.5 MiB, 1\.0 MiB of 3\.0 MiB are free$",
    ):
        device.allocate(3 << 19, "tape")
    assert device.meter.live_bytes == device.meter.peak_bytes == held.nbytes
    device.allocate(1 << 20, "exactly the rest")


def test_the_count_holds_from_many_threads() -> None:
    meter = Meter(None)

    def work() -> None:
        for _ in range(2000):
            meter.add(3, "x")
            meter.remove(3)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter.live_bytes == 0
    assert 3 <= meter.peak_bytes <= 12


def test_garbage_that_is_collected_while_counting_is_counted_off() -> None:
    """A lock that is not reentrant would wait for itself here, for ever."""
    device = CpuDevice(cap_bytes=100)
    done = threading.Event()

    class Collecting(str):
        def __format__(self, spec: str) -> str:  # inside `add`, with its lock held
            gc.collect()
            return str(self)

    def work() -> None:
        cycle: list[object] = [device.counted(torch.ones(10), "hidden states")]
        cycle.append(cycle)
        del cycle
        with pytest.raises(OutOfDeviceMemory, match=r"^device memory: tape needs"):
            device.allocate(200, Collecting("tape"))
        done.set()

    gc.disable()
    try:
        threading.Thread(target=work, daemon=True).start()
        assert done.wait(HANG_S)
    finally:
        gc.enable()
    assert device.meter.live_bytes == 0


TENSORS = {
    "bf16": torch.randn(2, 3, 4).bfloat16(),
    "fp32": torch.randn(2, 3, 4),
    "transposed": torch.randn(2, 3, 4).transpose(1, 2),
    "a slice": torch.randn(4, 6, 8)[1:3, ::2, 2:5],
    "expanded": torch.randn(1, 3, 1).expand(2, 3, 4),
    "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
    "empty": torch.zeros(0, 4),
    "wants a gradient": torch.randn(3).requires_grad_(),
}


def bits(tensor: Tensor) -> Tensor:
    whole = tensor.detach().contiguous()
    return whole.view({2: torch.int16, 4: torch.int32}[whole.element_size()])


@pytest.mark.parametrize("name", TENSORS)
def test_copies_have_the_bits_and_touch_nothing_else(name: str) -> None:
    source = TENSORS[name]
    around = torch.full((source.numel() + 8,), 7, dtype=source.dtype)
    target = around[4:-4].view(source.shape)
    CpuDevice(copying=True).copy(target, source)
    assert torch.equal(bits(target), bits(source))
    assert (around[:4] == 7).all()
    assert (around[-4:] == 7).all()


def test_copies_that_convert_would_be_noticed() -> None:
    signaling = torch.tensor([0x7FA00001, -0x80000000], dtype=torch.int32).view(torch.float32)
    target = torch.zeros(2)
    copy_bits(target, signaling)
    assert torch.equal(bits(target), bits(signaling))
    copy_bits(target, signaling + 0)  # arithmetic makes a NaN quiet, and of -0 a 0
    assert not torch.equal(bits(target), bits(signaling))


@pytest.mark.parametrize("copying", [True, False])
def test_host_and_device_are_one_memory(copying: bool) -> None:
    device, tensor = CpuDevice(copying=copying), torch.randn(3)
    for way in (device.pinned, device.place, device.to_device, device.to_host, device.read):
        assert way(tensor) is tensor
    device.pin("weights", tensor.view(torch.uint8))
    device.synchronize()
    device.close()
    assert not device.own_memory
    assert device.copying == copying
    assert device.peak_bytes == 0


def test_a_seed_decides_what_is_drawn_and_the_callers_draws_go_on() -> None:
    device = CpuDevice()
    torch.manual_seed(1)
    expected = torch.rand(6)
    torch.manual_seed(1)
    first = torch.rand(3)
    state = device.random_state()
    device.seed(5)
    drawn = torch.rand(4)
    device.seed(5)
    assert torch.equal(torch.rand(4), drawn)
    device.seed(6)
    assert not torch.equal(torch.rand(4), drawn)
    device.set_random_state(state)
    assert torch.equal(torch.cat([first, torch.rand(3)]), expected)


def test_a_cap_that_comes_later_is_the_least_of_both() -> None:
    device = CpuDevice()
    device.cap(300)
    for asked in (200, 400):
        device.cap(asked)
        with pytest.raises(OutOfDeviceMemory, match=r"tape needs"):
            device.allocate(250, "tape")
        assert device.allocate(200, "tape").nbytes == 200
    assert device.peak_bytes == 200
