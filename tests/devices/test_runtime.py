"""runtime.py as far as it goes without an accelerator; what it does with one is marked `gpu`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megatrain.config.value_types import read_device
from megatrain.devices import runtime as runtime_module
from megatrain.devices.accelerator import AcceleratorDevice, NotDriven, accelerator, find_device
from megatrain.devices.device import CpuDevice
from megatrain.devices.runtime import (
    PINNING_CAUSES,
    TAKEN,
    PinningFailed,
    TorchRuntime,
    num_accelerators,
)
from megatrain.doctor.subject import CPU, find_subject
from megatrain.errors import ConfigError, NoDevice
from megatrain.step.ops import LANES, Op, OpKind
from testkit.simulated.accelerator import Simulator


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("name", ["", "cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_not_called_full(name: str) -> None:
    way_out = r"memory\.device: cpu \(in commands --device cpu\)"
    text = rf"^{name or 'accelerator'}: torch .* finds no accelerator .* {way_out}"
    with pytest.raises(NoDevice, match=text):
        TorchRuntime.find(name)
    with pytest.raises(NoDevice, match=text):
        accelerator(name)


def runtime_of(device: str) -> TorchRuntime:
    """A runtime that was not given a device to set."""
    runtime = TorchRuntime.__new__(TorchRuntime)
    runtime.device = torch.device(device)
    if device != "meta":
        runtime._module = torch.get_device_module(runtime.device)
    return runtime


def test_a_range_is_named_for_the_profiler_where_torch_has_one() -> None:
    runtime, noted = runtime_of("cuda"), list[str]()

    @contextmanager
    def entered(name: str) -> Iterator[None]:
        noted.append(f"push {name}")
        yield
        noted.append("pop")

    runtime._module = SimpleNamespace(nvtx=SimpleNamespace(range=entered))
    with runtime.named_range("FETCH(1)"):
        noted.append("inside")
    assert noted == ["push FETCH(1)", "inside", "pop"]
    runtime._module = SimpleNamespace()
    with pytest.raises(ConfigError, match=r"^MEGATRAIN_NVTX is set: torch has no NVTX "):
        runtime.named_range("FETCH(1)")


@pytest.mark.parametrize("asked", ["", "1"])
def test_ops_are_named_if_the_environment_asks(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_NVTX", asked)
    simulator = Simulator()
    for lane in AcceleratorDevice(simulator).lanes():
        lane.act(Op(kind=OpKind.UPDATE, block=len(lane.name)), lambda op: 3)
    named = [f"UPDATE({len(name)})" for name in LANES]
    assert simulator.ranges == (named if asked else [])


@pytest.mark.parametrize(
    ("name", "found", "current", "expected"),
    [
        ("", "cuda", 0, "cuda:0"),
        ("", "xpu", 2, "xpu:2"),
        ("cuda", "cuda", 1, "cuda:1"),
        ("cuda:3", "cuda", 0, "cuda:3"),
    ],
)
def test_the_device_that_is_found_has_an_index(
    name: str, found: str, current: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[torch.device] = []
    accelerators = SimpleNamespace(
        current_accelerator=lambda check_available: torch.device(found),
        current_device_index=lambda: current,
        set_device_index=chosen.append,
        device_count=lambda: 4,
    )
    monkeypatch.setattr(torch, "accelerator", accelerators)
    monkeypatch.setattr(torch, "get_device_module", lambda device: None)
    assert TorchRuntime.find(name).device == torch.device(expected)
    assert chosen == [torch.device(expected)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cuda:4", r"^cuda:4: this machine has 4 devices, the last is cuda:3$"),
        ("xpu", r"^xpu: the accelerator of this machine is cuda$"),
        ("meta", r"^meta: the accelerator of this machine is cuda$"),
        ("cpu", r"^cpu is not an accelerator\. Use mt\.CpuDevice\(\), or memory\.device: cpu$"),
        ("nonsense", r"^nonsense is not a device\. Give cpu, cuda, cuda:1 or xpu$"),
        ("cuda:-1", r"^cuda:-1 is not a device\. Give cpu, cuda, cuda:1 or xpu$"),
    ],
)
def test_another_device_than_there_is_is_refused_by_name(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerators = SimpleNamespace(
        current_accelerator=lambda check_available: torch.device("cuda"), device_count=lambda: 4
    )
    monkeypatch.setattr(torch, "accelerator", accelerators)
    with pytest.raises(NoDevice, match=text):
        TorchRuntime.find(name)


def torch_with(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Let torch's accelerator be a device of this type, of which there is one."""
    accelerators = SimpleNamespace(
        current_accelerator=lambda check_available: torch.device(kind),
        current_device_index=lambda: 0,
        set_device_index=lambda device: None,
        device_count=lambda: 1,
    )
    monkeypatch.setattr(torch, "accelerator", accelerators)
    monkeypatch.setattr(torch, "get_device_module", lambda device: None)


@pytest.mark.parametrize("kind", ["mps", "mtia", "hpu"])
def test_an_accelerator_that_cannot_be_driven_leaves_auto_to_the_cpu(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_with(monkeypatch, kind)
    why = rf"^{kind}: MegaTrain cannot drive this type of device, only cuda and xpu, .* each\. "
    with pytest.warns(NotDriven, match=rf"{why}Compute runs on the CPU\.$") as told:
        assert isinstance(find_device("auto"), CpuDevice)
    assert len(told) == 1
    assert num_accelerators() == 0
    assert find_subject("auto") is CPU
    for refuse in (find_device, accelerator, find_subject):
        with pytest.raises(NoDevice, match=rf"{why}Use memory\.device: cpu \(in comm"):
            refuse(kind)


def test_a_config_refuses_mps_by_name() -> None:
    with pytest.raises(ValueError, match="give auto, cpu, cuda, cuda:1 or xpu"):
        read_device("mps")


@pytest.mark.parametrize("device", ["xpu:0", "mps:0", "cpu"])
def test_host_memory_is_registered_where_torch_has_cudas_runtime(device: str) -> None:
    kind = device.split(":")[0]
    with pytest.raises(PinningFailed, match=f"^torch cannot register host memory for {kind}$"):
        runtime_of(device).register(0, 4096)


class Driver:
    """CUDA's runtime, which answers every call with one code."""

    def __init__(self, code: int) -> None:
        self.code, self.calls = code, list[tuple[object, ...]]()

    def cudaHostRegister(self, *args: int) -> int:  # noqa: N802
        self.calls.append(args)
        return self.code

    def cudaHostUnregister(self, *args: int) -> int:  # noqa: N802
        self.calls.append(args)
        return self.code

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return {2: "out of memory", 712: "already mapped"}[code]

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.calls.append(("cleared",))
        return self.code


@pytest.mark.parametrize(
    ("code", "text", "advice"),
    [(0, "", ""), (2, "out of memory", PINNING_CAUSES), (712, "already mapped", TAKEN)],
)
def test_what_the_driver_answers_is_told_in_its_words_and_does_not_stay_pending(
    code: int, text: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(code)
    runtime = runtime_of("cuda:0")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.append)
    tried: dict[str, Callable[[], None]] = {
        "cudaHostRegister": lambda: runtime.register(4096, 100),
        "cudaHostUnregister": lambda: runtime.unregister(4096),
    }
    for name, call in tried.items():
        if not code:
            call()
            continue
        with pytest.raises(PinningFailed, match=rf"^{name}: {text} \(error {code}\)$") as told:
            call()
        assert told.value.advice == advice
    cleared = [("cleared",)] if code else []
    assert driver.calls == [(4096, 100, 0), *cleared, (4096,), *cleared]
    assert devices == [torch.device("cuda:0")] * 2  # of the thread that calls


@pytest.mark.parametrize(
    ("device", "by_user", "expected"),
    [
        ("cuda:0", None, ["expandable_segments:True"]),
        ("cuda:0", "PYTORCH_ALLOC_CONF", []),
        ("cuda:0", "PYTORCH_CUDA_ALLOC_CONF", []),
        ("xpu:0", None, ["pinned_max_cached_size_mb:64"]),
        ("xpu:0", "PYTORCH_ALLOC_CONF", []),
    ],
)
def test_an_allocator_is_told_what_its_device_needs_unless_the_user_has_set_it(
    device: str, by_user: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if by_user is not None:
        monkeypatch.setenv(by_user, "max_split_size_mb:512")
    monkeypatch.setattr("megatrain.devices.runtime.set_allocator", told.append)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: told.append("set"))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(nvmlInit_v2=lambda: 0))
    TorchRuntime(torch.device(device))
    assert told == [*expected, "set"]  # before the device is touched


@pytest.mark.parametrize("answer", [None, 9, 0], ids=["not there", "fails", "answers"])
def test_segments_grow_only_where_the_driver_can_be_asked_about_links(
    answer: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch asks NVML before its first segment that grows, and dies without it."""
    told: list[str] = []

    def load(name: str) -> SimpleNamespace:
        assert name == "libnvidia-ml.so.1"
        if answer is None:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(nvmlInit_v2=lambda: answer)

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr("megatrain.devices.runtime.set_allocator", told.append)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    TorchRuntime(torch.device("cuda:0"))
    assert told == (["expandable_segments:True"] if answer == 0 else [])


@pytest.mark.parametrize(
    ("device", "capability", "dtype", "expected"),
    [
        ("cuda", (9, 0), torch.bfloat16, True),
        ("cuda", (10, 3), torch.bfloat16, True),
        ("cuda", (9, 0), torch.float32, False),
        ("cuda", (8, 9), torch.bfloat16, False),
        ("cuda", (12, 0), torch.bfloat16, False),
        ("xpu", None, torch.bfloat16, True),
        ("meta", None, torch.bfloat16, False),
    ],
)
def test_which_cards_have_a_kernel_for_products_of_experts(
    device: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If torch has one for the type of device, and it runs."""
    runtime = TorchRuntime.__new__(TorchRuntime)
    runtime.device = torch.device(device)
    runtime._module = SimpleNamespace(get_device_capability=lambda device: capability)
    assert not runtime.groups(dtype), "this torch is for the CPU"
    monkeypatch.setattr(runtime_module, "has_grouped_kernel", lambda one: one.type != "meta")
    monkeypatch.setattr(runtime_module, "grouped_products_run", lambda *form: True)
    assert runtime.groups(dtype) is expected
    monkeypatch.setattr(runtime_module, "grouped_products_run", lambda *form: False)
    assert not runtime.groups(dtype)
