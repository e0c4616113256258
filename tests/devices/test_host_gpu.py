"""Finding an accelerator, and what the engine asks of it, where torch itself drives one."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import cast

import pytest
import torch

from megatrain.devices import runtime as runtime_module
from megatrain.devices.accelerator import AcceleratorDevice, accelerator, find_device
from megatrain.devices.device import CpuDevice
from megatrain.devices.runtime import TorchRuntime, num_accelerators
from megatrain.errors import NoDevice, OutOfDeviceMemory

pytest.importorskip("testkit.host_gpu", exc_type=ImportError)

from testkit.host_gpu import control
from testkit.patience import HANG_S
from testkit.worlds import Case, world_of

pytestmark = pytest.mark.hostgpu


@pytest.mark.parametrize(
    ("name", "local_rank", "found"),
    [
        ("", None, "hostgpu:0"),
        ("hostgpu", None, "hostgpu:0"),
        ("hostgpu:1", None, "hostgpu:1"),
        ("hostgpu", 1, "hostgpu:1"),
        ("", 0, "hostgpu:0"),
    ],
)
def test_a_device_is_found_by_name_and_rank(name: str, local_rank: int | None, found: str) -> None:
    runtime = TorchRuntime.find(name, local_rank)
    assert str(runtime.device) == found
    assert torch.accelerator.current_device_index() == runtime.device.index


@pytest.mark.parametrize(
    ("name", "local_rank", "text"),
    [
        ("nothing", None, "^nothing is not a device"),
        ("cuda", None, "^cuda: the accelerator of this machine is hostgpu$"),
        ("hostgpu:2", None, "^hostgpu:2: this machine has 2 devices, the last is hostgpu:1$"),
        ("", 2, "^rank 2 of this host has no device: the host has 2"),
    ],
)
def test_a_device_that_is_not_there_is_said(name: str, local_rank: int | None, text: str) -> None:
    with pytest.raises(NoDevice, match=text):
        accelerator(name, local_rank=local_rank)


def test_auto_is_the_accelerator_where_there_is_one() -> None:
    assert isinstance(find_device("auto"), AcceleratorDevice)
    assert isinstance(find_device("hostgpu:1"), AcceleratorDevice)
    assert isinstance(find_device("cpu"), CpuDevice)
    assert num_accelerators() == 2
    with control.present(False):
        assert isinstance(find_device("auto"), CpuDevice)
        assert num_accelerators() == 0
        with pytest.raises(NoDevice, match="finds no accelerator"):
            find_device("hostgpu")
    with pytest.raises(NoDevice, match="the accelerator of this machine is hostgpu"):
        find_device("cuda")


def test_an_integrated_device_counts_the_memory_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime_module, "host_free_bytes", lambda: 3 << 20)
    runtime = TorchRuntime.find("hostgpu:1")
    assert not runtime.integrated
    own = runtime.free_bytes()
    assert own > 3 << 20
    with control.integrated():
        assert runtime.integrated
        assert AcceleratorDevice(runtime).integrated
        assert runtime.free_bytes() - torch.accelerator.memory_reserved(1) <= 3 << 20
        assert runtime.free_bytes() < own


def test_a_capped_device_is_full() -> None:
    capped = accelerator("hostgpu:1", cap_bytes=4 << 20)
    with pytest.raises(
        OutOfDeviceMemory, match=r"^device memory: slots needs 8\.0 MiB, 4\.0 MiB are"
    ):
        capped.allocate(8 << 20, "slots")


def test_a_collective_is_queued_on_the_stream_of_the_thread() -> None:
    device = accelerator("hostgpu:1")
    memory = device.allocate(16, "exchange").view(torch.float32)

    def add() -> None:
        memory.add_(1)

    with control.timed("lazy"), torch.Stream(device.name):
        memory.fill_(1)
        device.communicate([memory], [memory], add)
        copy = device.to_host(memory)
        torch.accelerator.current_stream().synchronize()
    assert copy.tolist() == [2.0] * 4


@pytest.mark.parametrize("waits", [True, False])
def test_a_value_that_is_read_is_there(waits: bool) -> None:
    device = accelerator("hostgpu:1")
    memory = device.allocate(16, "results").view(torch.float32)
    with control.timed("lazy"), torch.Stream(device.name):
        memory.fill_(1)
        brought = device.read(memory) if waits else device.to_host(memory)
        found = brought.tolist()
        torch.accelerator.current_stream().synchronize()
    assert (found == [1.0] * 4) is waits


def test_lanes_of_one_kind_share_a_stream_and_those_of_two_kinds_or_roles_never_do() -> None:
    """Torch has 32 streams, and twelve engines want more."""
    seen: dict[str, set[torch.Stream]] = defaultdict(set)
    for _ in range(12):
        device = accelerator("hostgpu:1")
        for lane in device.lanes():
            if isinstance(lane._stream, torch.Stream):
                seen[lane.name].add(lane._stream)
        for role in ("casts", "pages in"):
            seen[role].add(cast("torch.Stream", device.role_stream(role)))
    assert [len(streams) for streams in seen.values()] == [1] * len(seen)
    assert len({stream for streams in seen.values() for stream in streams}) == len(seen) > 4
    unnamed = [TorchRuntime.find("hostgpu:1").stream() for _ in range(40)]
    assert len(set(unnamed)) < 40, "they are handed out again"


def test_an_engine_asks_for_a_stream_by_each_role(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that come in would wait behind casts of gradients, which wait for drains."""
    asked: list[tuple[str, torch.Stream]] = []
    original = AcceleratorDevice.role_stream

    def role_stream(device: AcceleratorDevice, role: str) -> torch.Stream:
        stream = cast("torch.Stream", original(device, role))
        asked.append((role, stream))
        return stream

    monkeypatch.setattr(AcceleratorDevice, "role_stream", role_stream)
    case = Case(sort="mixtral", steps=(), update="late", expert_pages=2)
    with world_of("mixtral").engine(case, device=accelerator("hostgpu:1")):
        pass
    roles, streams = {role for role, _ in asked}, {stream for _, stream in asked}
    assert len(asked) == len(roles) == len(streams) == 2


@pytest.mark.parametrize("one_object", [False, True])
def test_two_threads_that_have_entered_one_stream_return_to_their_own(one_object: bool) -> None:
    """Two engines of a process have one stream for a role."""
    device = accelerator("hostgpu:1")
    streams = [cast("torch.Stream", device.role_stream("casts")) for _ in range(2)]
    returned: dict[int, bool] = {}
    entered = [threading.Event(), threading.Event()]
    first_is_out = threading.Event()

    def enter(number: int, until: threading.Event) -> None:
        own = torch.Stream(device.name)
        if number == 1:
            entered[0].wait(HANG_S)
        with own:
            with streams[0] if one_object else streams[number]:
                entered[number].set()
                until.wait(HANG_S)
            returned[number] = device.current_stream() == own
        first_is_out.set()

    ends = (entered[1], first_is_out)  # who came first leaves first
    threads = [threading.Thread(target=enter, args=(n, ends[n])) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert streams[0] == streams[1]
    assert all(returned.values()) is not one_object


def test_experts_have_no_kernel_of_groups_here() -> None:
    assert not accelerator("hostgpu").groups(torch.bfloat16)


def test_a_snapshot_that_fails_does_not_hide_the_error_it_explains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(runtime: TorchRuntime) -> None:
        raise RuntimeError("no snapshot")

    monkeypatch.setattr(TorchRuntime, "memory_snapshot", fails)
    assert accelerator("hostgpu").memory_snapshot() is None
