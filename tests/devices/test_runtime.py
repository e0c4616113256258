"""runtime.py as far as it goes without an accelerator; what it does with one is marked `gpu`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatrain.devices.accelerator import accelerator
from megatrain.devices.runtime import PinningFailed, TorchRuntime
from megatrain.errors import NoDevice


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("name", ["", "cuda", "cuda:1"])
def test_a_device_that_is_not_there_is_not_called_full(name: str) -> None:
    text = rf"^{name or 'accelerator'}: torch .* finds no accelerator .* memory\.device: cpu"
    with pytest.raises(NoDevice, match=text):
        TorchRuntime.find(name)
    with pytest.raises(NoDevice, match=text):
        accelerator(name)


def runtime_of(device: str) -> TorchRuntime:
    """A runtime that was not given a device to set."""
    runtime = TorchRuntime.__new__(TorchRuntime)
    runtime.device = torch.device(device)
    return runtime


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


@pytest.mark.parametrize("device", ["xpu:0", "mps:0", "cpu"])
def test_host_memory_is_registered_for_cuda_alone(device: str) -> None:
    kind = device.split(":")[0]
    with pytest.raises(PinningFailed, match=f"^torch cannot register host memory for {kind}$"):
        runtime_of(device).register(0, 4096)


@pytest.mark.parametrize("code", [0, 2])
def test_what_the_driver_answers_is_told(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def register(*args: int) -> int:
        calls.append(args)
        return code

    driver = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda *args: calls.append(args)
    )
    runtime = runtime_of("cuda:0")
    monkeypatch.setattr(TorchRuntime, "_cudart", staticmethod(lambda: driver))
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.append)
    if code:
        with pytest.raises(PinningFailed, match=r"^cudaHostRegister returned 2$"):
            runtime.register(4096, 100)
    else:
        runtime.register(4096, 100)
    runtime.unregister(4096)
    assert calls == [(4096, 100, 0), (4096,)]
    assert devices == [torch.device("cuda:0")]  # of the thread that registers


def test_memory_of_the_host_is_not_the_devices() -> None:
    assert not runtime_of("cuda:0").is_device(torch.zeros(1))
    assert runtime_of("meta").is_device(torch.zeros(1, device="meta"))
