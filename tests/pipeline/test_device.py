"""The device: memory is counted while it is used, a cap is a law, copies are exact."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatrain.errors import DeviceFull
from megatrain.pipeline.device import CpuDevice, Meter


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
    hidden = device.keep(torch.ones(25, requires_grad=True), "hidden states")
    held = HOLDERS[holder](hidden)
    del hidden
    assert device.meter.live_bytes == 100
    del held
    assert device.meter.live_bytes == 0


def test_what_exceeds_the_cap_is_refused_by_purpose_and_not_counted() -> None:
    device = CpuDevice(cap_bytes=3 << 20)
    held = device.allocate(2 << 20, "weight slots")
    with pytest.raises(
        DeviceFull, match=r"^device memory: tape needs 1\.5 MiB, 1\.0 MiB of 3\.0 MiB are free$"
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
        cycle: list[object] = [device.keep(torch.ones(10), "hidden states")]
        cycle.append(cycle)
        del cycle
        with pytest.raises(DeviceFull, match=r"^device memory: tape needs"):
            device.allocate(200, Collecting("tape"))
        done.set()

    gc.disable()
    try:
        threading.Thread(target=work, daemon=True).start()
        assert done.wait(10)
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
def test_copies_have_the_bits_and_memory_of_their_own(name: str) -> None:
    device, tensor = CpuDevice(copying=True), TENSORS[name]
    there = device.to_host(tensor, None)
    back = device.to_device(there)
    for copy in (there, back):
        assert torch.equal(bits(copy), bits(tensor))
        assert copy.stride() == torch.empty_like(tensor).stride()
        assert not copy.requires_grad
    pointers = {t.data_ptr() for t in (tensor, there, back)}
    assert len(pointers) == 3 or tensor.numel() == 0
    assert device.meter.live_bytes == back.nbytes  # the host's copy is not the device's


def test_a_buffer_that_fits_is_used_again_and_no_other() -> None:
    device = CpuDevice(copying=True)
    first, second = torch.randn(2, 3), torch.randn(2, 3)
    buffer = device.to_host(first, None)
    assert device.to_host(second, buffer) is buffer
    assert torch.equal(buffer, second)
    for other in (torch.randn(3, 2), torch.randn(3, 2).t(), torch.randn(2, 3).bfloat16()):
        copy = device.to_host(other, buffer)
        assert copy is not buffer
        assert torch.equal(copy, other)


def test_unified_memory_copies_nothing() -> None:
    device, tensor = CpuDevice(copying=False), torch.randn(3)
    assert device.to_host(tensor, None) is tensor
    assert device.to_device(tensor) is tensor
    assert device.meter.live_bytes == 0


def test_fill_writes_the_bytes_and_nothing_beside() -> None:
    device = CpuDevice(copying=True)
    target = torch.zeros(8, dtype=torch.uint8)
    device.fill(target[2:5], torch.tensor([1, 2, 255], dtype=torch.uint8))
    assert target.tolist() == [0, 0, 1, 2, 255, 0, 0, 0]
