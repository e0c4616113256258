"""The device of testkit/host_gpu keeps what CUDA promises, and no more than that."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext

import psutil
import pytest
import torch
from torch import Tensor

pytest.importorskip("testkit.host_gpu", exc_type=ImportError)

from testkit.host_gpu import control, module

pytestmark = pytest.mark.hostgpu
LONG = 200_000_000
"""Cycles of a tenth of a second: far longer than the host needs for a few calls."""
AT = "hostgpu:0"


def test_torch_finds_the_device_and_threads_have_their_own() -> None:
    found = torch.accelerator.current_accelerator(check_available=True)
    assert found is not None
    assert found.type == "hostgpu"
    assert torch.accelerator.device_count() == 2
    assert torch.get_device_module("hostgpu") is module
    seen: list[int] = []
    with torch.accelerator.device_index(1):
        assert torch.ones(2, device="hostgpu").device.index == 1
        thread = threading.Thread(
            target=lambda: seen.append(torch.accelerator.current_device_index())
        )
        thread.start()
        thread.join()
    assert seen == [0]
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.accelerator.set_device_index(2)


def test_a_hidden_device_is_no_accelerator() -> None:
    with control.present(False):
        assert not torch.accelerator.is_available()
        assert torch.accelerator.current_accelerator(check_available=True) is None


def test_a_stream_works_while_the_host_goes_on() -> None:
    stream, other = torch.Stream(AT), torch.Stream(AT, priority=-1)
    assert stream != other
    with control.timed("lazy"), stream:
        made = torch.ones(4, device=AT)
        event = stream.record_event()
        assert torch.accelerator.current_stream() == stream
    other.wait_event(event)
    with other:
        more = made + 1
    other.synchronize()
    assert event.query()
    assert more.tolist() == [2.0] * 4
    assert torch.accelerator.current_stream() not in (stream, other)


def _late_write(stream: torch.Stream) -> Tensor:
    with stream:
        written = torch.zeros(4, device=AT)
        stream.synchronize()
        module._sleep(LONG)
        written.fill_(1)
    return written


@pytest.mark.parametrize("waits", [True, False])
def test_only_an_event_orders_two_streams(waits: bool) -> None:
    first, second = torch.Stream(AT), torch.Stream(AT)
    written = _late_write(first)
    if waits:
        second.wait_event(first.record_event())
    with second:
        read = written.clone()
    torch.accelerator.synchronize()
    assert read.tolist() == [float(waits)] * 4


def test_an_event_recorded_before_the_work_orders_nothing() -> None:
    first, second = torch.Stream(AT), torch.Stream(AT)
    early = first.record_event()
    written = _late_write(first)
    second.wait_event(early)
    with second:
        read = written.clone()
    torch.accelerator.synchronize()
    assert read.tolist() == [0.0] * 4


def test_timed_events_tell_when_the_device_worked() -> None:
    first, second, third = (torch.Event(AT, enable_timing=True) for _ in range(3))
    first.record()
    module._sleep(LONG)
    second.record()
    third.record()
    third.synchronize()
    assert first.elapsed_time(second) >= 100
    assert second.elapsed_time(third) < first.elapsed_time(second)


def test_memory_of_the_device_is_beyond_the_host() -> None:
    made = torch.ones(4, device=AT)
    torch.accelerator.synchronize()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(made.data_ptr(), 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_fresh_and_dropped_memory_is_poison() -> None:
    torch.accelerator.empty_cache()
    assert torch.empty(64, device=AT).isnan().all()
    address = torch.ones(64, device=AT).data_ptr()
    again = torch.empty(64, device=AT)
    assert again.data_ptr() == address
    assert again.isnan().all()


@pytest.mark.parametrize("told", [True, False])
def test_memory_dropped_under_another_stream_is_lost_unless_recorded(told: bool) -> None:
    first, second = torch.Stream(AT), torch.Stream(AT)
    with first:
        made = torch.ones(4, device=AT)
    first.synchronize()
    with second:
        module._sleep(LONG)
        read = made + 1
    if told:
        made.record_stream(second)
    del made
    with first:
        other = torch.zeros(4, device=AT)
    torch.accelerator.synchronize()
    assert (read.tolist() == [2.0] * 4) is told
    del other


def test_memory_is_free_for_its_own_stream_alone() -> None:
    first, second = torch.Stream(AT), torch.Stream(AT)
    with first:
        address = torch.empty(1000, device=AT).data_ptr()
        assert torch.empty(1000, device=AT).data_ptr() == address
    with second:
        assert torch.empty(1000, device=AT).data_ptr() != address


MIB = 1 << 20


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        ([100], 2),
        ([MIB], 2),
        ([MIB, MIB], 2),
        ([MIB + 1], 20),
        ([9 * MIB, 9 * MIB], 20),
        ([10 * MIB], 10),
        ([10 * MIB + 1], 12),
        ([10 * MIB, 3 * MIB], 30),
        ([15 * MIB], 16),
    ],
)
def test_segments_have_the_sizes_of_cuda(asked: list[int], reserved: int) -> None:
    before = torch.accelerator.memory_reserved()
    held = [torch.empty(size, dtype=torch.uint8, device=AT) for size in asked]
    assert torch.accelerator.memory_reserved() - before == reserved * MIB
    held.clear()
    assert torch.accelerator.memory_reserved() - before == reserved * MIB
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == before


def test_a_block_is_cut_and_joined_again() -> None:
    def take(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=AT)

    whole = take(9 * MIB)
    start = whole.data_ptr()
    del whole
    parts = [take(3 * MIB) for _ in range(3)]
    assert [part.data_ptr() - start for part in parts] == [0, 3 * MIB, 6 * MIB]
    parts.clear()
    assert take(9 * MIB).data_ptr() == start


def test_memory_is_counted_in_blocks() -> None:
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    first = torch.empty(1000, dtype=torch.uint8, device=AT)
    second = torch.empty(MIB, dtype=torch.uint8, device=AT)
    del second
    assert torch.accelerator.memory_allocated() - before == 1024
    assert torch.accelerator.max_memory_allocated() - before == 1024 + MIB
    free, total = torch.accelerator.get_memory_info()
    assert total - free == torch.accelerator.memory_reserved()
    del first


def test_a_cap_is_out_of_memory_and_can_be_lifted() -> None:
    total = torch.accelerator.get_memory_info()[1]
    module.set_per_process_memory_fraction(8 * MIB / total, AT)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 16777216 bytes"):
        torch.empty(16 * MIB, dtype=torch.uint8, device=AT)
    assert torch.empty(16 * MIB, dtype=torch.uint8, device="hostgpu:1").nbytes == 16 * MIB
    module.set_per_process_memory_fraction(1.0, AT)
    assert torch.empty(16 * MIB, dtype=torch.uint8, device=AT).nbytes == 16 * MIB


def test_cached_memory_of_another_stream_is_given_back_before_memory_is_out() -> None:
    total = torch.accelerator.get_memory_info()[1]
    module.set_per_process_memory_fraction(32 * MIB / total, AT)
    with torch.Stream(AT):
        del_me = torch.empty(20 * MIB, dtype=torch.uint8, device=AT)
        del del_me
    assert torch.empty(30 * MIB, dtype=torch.uint8, device=AT).nbytes == 30 * MIB


@pytest.mark.parametrize("pinned", [True, False])
def test_only_copies_of_pinned_memory_leave_the_host_free(pinned: bool) -> None:
    there = torch.ones(1000, device=AT)
    host = torch.zeros(1000, pin_memory=pinned)
    assert host.is_pinned() is pinned
    before = control.counters()["silent_waits"]
    with control.timed("lazy"):
        host.copy_(there, non_blocking=True)
        assert host.eq(0).all().item() is pinned
    assert control.counters()["silent_waits"] - before == (not pinned)
    torch.accelerator.synchronize()
    assert host.eq(1).all()


@pytest.mark.parametrize("late", [True, False])
def test_an_integrated_device_reads_pageable_memory_late(late: bool) -> None:
    host, there = torch.ones(100), torch.zeros(100, device=AT)
    with control.integrated() if late else nullcontext(), control.timed("lazy"):
        there.copy_(host, non_blocking=True)
        host.fill_(2)
    assert there.tolist() == [2.0 if late else 1.0] * 100


def test_an_integrated_device_has_the_memory_of_the_host() -> None:
    own = torch.accelerator.get_memory_info(AT)[1]
    with control.integrated():
        free, total = torch.accelerator.get_memory_info(AT)
    assert total == psutil.virtual_memory().total != own
    assert 0 < free <= total


def test_the_host_waits_where_a_stream_has_a_thousand_tasks_before_it() -> None:
    there, before = torch.zeros(1, device=AT), control.counters()["full_queues"]
    with control.timed("lazy"):
        for _ in range(500):
            there.add_(1)
        assert control.counters()["full_queues"] == before
        for _ in range(1000):
            there.add_(1)
        assert control.counters()["full_queues"] > before
    assert there.item() == 1500


def test_a_pinned_buffer_written_early_spoils_its_copy() -> None:
    host, there = torch.ones(100, pin_memory=True), torch.zeros(100, device=AT)
    with control.timed("lazy"):
        there.copy_(host, non_blocking=True)
        host.fill_(2)
    assert there.tolist() == [2.0] * 100


def test_a_pinned_buffer_lives_until_its_copies_are_done() -> None:
    there = torch.zeros(100, device=AT)
    before = control.counters()["late_frees"]
    with control.timed("lazy"):
        for number in range(10):
            there.add_(torch.full((100,), number).pin_memory().to(AT, non_blocking=True))
        assert control.counters()["late_frees"] > before
    assert there.tolist() == [45.0] * 100


def test_registered_memory_has_borders_and_codes_of_cuda() -> None:
    host = torch.zeros(1 << 16, dtype=torch.uint8)
    half = host.nbytes // 2
    there = torch.ones(1 << 16, dtype=torch.uint8, device=AT)
    cudart = module.cudart()
    assert cudart.cudaHostRegister(host.data_ptr(), half, 0) == 0
    assert cudart.cudaHostRegister(host.data_ptr() + 10, half, 0) == 712
    assert cudart.cudaGetLastError() == 712
    assert cudart.cudaGetLastError() == 0
    assert host.is_pinned()
    assert control.registered_bytes() == half
    with pytest.raises(RuntimeError, match="crosses the end of its pinned memory"):
        host.copy_(there, non_blocking=True)
    host[:half].copy_(there[:half], non_blocking=True)
    torch.accelerator.synchronize()
    assert host.sum() == half
    assert cudart.cudaHostUnregister(host.data_ptr()) == 0
    assert cudart.cudaHostUnregister(host.data_ptr()) == 713
    assert "does not correspond" in cudart.cudaGetErrorString(713)
    assert cudart.cudaHostRegister(0, half, 0) == 1
    control.refuse_registration_at(1)
    assert cudart.cudaHostRegister(host.data_ptr(), half, 0) == 2
    assert cudart.cudaGetLastError() == 2


@pytest.mark.parametrize("flags", [0, 1])
def test_memory_is_registered_for_a_device_unless_it_is_portable(flags: int) -> None:
    host, there = torch.zeros(4096), torch.ones(4096, device="hostgpu:1")
    before = control.counters()["silent_waits"]
    assert module.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, flags) == 0
    host.copy_(there, non_blocking=True)
    assert control.counters()["silent_waits"] - before == 1 - flags
    torch.accelerator.synchronize(1)
    assert module.cudart().cudaHostUnregister(host.data_ptr()) == 0


def test_memory_unregistered_under_a_copy_loses_the_device() -> None:
    host, there = torch.zeros(4096), torch.ones(4096, device=AT)
    with control.timed("lazy"):
        assert module.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0) == 0
        host.copy_(there, non_blocking=True)
        assert module.cudart().cudaHostUnregister(host.data_ptr()) == 0
    with pytest.raises(torch.AcceleratorError, match="unregistered under a copy"):
        torch.accelerator.synchronize()


def test_random_numbers_are_a_seed_and_a_count_of_each_device() -> None:
    module.manual_seed(3)
    state = module.get_rng_state(AT)
    first, second = torch.rand(5, device=AT), torch.rand(5, device=AT)
    assert not torch.equal(first, second)
    module.set_rng_state(state, AT)
    assert torch.equal(first, torch.rand(5, device=AT))
    torch.manual_seed(3)
    assert torch.equal(first, torch.rand(5, device=AT))
    assert torch.equal(first, torch.rand(5, device="hostgpu:1").to(AT))
    generator = torch.Generator(AT).manual_seed(3)
    assert torch.equal(first, torch.rand(5, device=AT, generator=generator))
    module.manual_seed(4)
    assert torch.equal(second.cpu(), torch.rand(5, device="hostgpu:1").cpu())
    dropped = torch.nn.functional.dropout(torch.ones(1000, device=AT), 0.5)
    assert 350 < int((dropped == 0).sum()) < 650


def test_what_an_op_draws_is_fixed_when_it_is_queued() -> None:
    module.manual_seed(3)
    expected = torch.rand(5, device=AT).cpu()
    module.manual_seed(3)
    with control.timed("lazy"):
        drawn = torch.rand(5, device=AT)
        module.manual_seed(9)
    assert torch.equal(drawn.cpu(), expected)


def _item(tensor: Tensor) -> object:
    return tensor.sum().item()


@pytest.mark.parametrize("ask", [_item, Tensor.cpu, Tensor.nonzero])
def test_waits_can_be_forbidden(ask: Callable[[Tensor], object]) -> None:
    there = torch.ones(4, device=AT)
    module.set_sync_debug_mode("error")
    there.add_(1)
    with pytest.raises(RuntimeError, match="called a synchronizing operation"):
        ask(there)
    module.set_sync_debug_mode("default")
    ask(there)


def test_an_error_of_queued_work_is_told_later_and_to_all() -> None:
    table, wrong = torch.ones(4, 2, device=AT), torch.tensor([5]).to(AT)
    torch.nn.functional.embedding(wrong, table)
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError, match="work on a stream failed"):
            torch.accelerator.synchronize()
    with pytest.raises(torch.AcceleratorError):
        table + 1
    assert (torch.ones(2, device="hostgpu:1") + 1).tolist() == [2.0, 2.0]


def test_tensors_of_two_devices_are_refused() -> None:
    there = torch.ones(4, device=AT)
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(4)
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(4, device="hostgpu:1")
    assert (there + torch.tensor(2.0)).tolist() == [3.0] * 4
    assert torch.equal(there.to("hostgpu:1").cpu(), there.cpu())


def _gradients(device: str) -> list[Tensor]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Embedding(10, 16),
        torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        torch.nn.LayerNorm(16),
        torch.nn.Linear(16, 10),
    ).to(device)
    ids = torch.arange(10).view(2, 5).to(device)
    loss = torch.nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    grads = [param.grad for param in net.parameters()]
    return [loss.detach().cpu(), *(grad.cpu() for grad in grads if grad is not None)]


@pytest.mark.parametrize("timing", control.TIMINGS)
def test_a_net_computes_the_bits_of_the_cpu(timing: control.Timing) -> None:
    with control.timed(timing):
        found = _gradients(AT)
    expected = _gradients("cpu")
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_backward_is_queued_on_the_stream_of_forward() -> None:
    stream = torch.Stream(AT)
    with control.timed("lazy"), stream:
        given = torch.ones(8, device=AT, requires_grad=True)
        torch.autograd.backward((given * 3).sum())
        event = stream.record_event()
    stream.synchronize()
    assert event.query()
    assert given.grad is not None
    assert given.grad.tolist() == [3.0] * 8
