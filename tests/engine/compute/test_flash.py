"""Laws of engine/compute/flash.py. No package has its kernels here: a stand-in is registered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention as attention
from torch.nn.attention import _registry

from megatrain.devices.accelerator import Accelerator
from megatrain.devices.device import CpuDevice, Device
from megatrain.engine.compute import flash
from megatrain.engine.compute.flash import flash_kernels
from megatrain.errors import ConfigError
from megatrain.models.documents import KernelForm, kernel_runs
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched
from testkit.worlds import Case, make_batch, world_of

CASE = Case(sort="llama of 2 layers", steps=(), update="none")


class StandIn:
    """A package of kernels: whether they are registered now, and how often they were."""

    def __init__(self) -> None:
        self.active = False
        self.activations = 0

    def register(self) -> StandIn:
        self.active = True
        self.activations += 1
        return self

    def remove(self) -> None:
        self.active = False


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    made = StandIn()
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", made.register)
    yield made
    assert not made.active
    assert attention.current_flash_attention_impl() is None


def _device() -> Device:
    return Accelerator(Simulator(policy="early"), "simulated")


def test_torchs_own_kernels_are_asked_for_nothing(package: StandIn) -> None:
    for device in (CpuDevice(), _device()):
        with flash_kernels("torch", device):
            assert attention.current_flash_attention_impl() is None
    assert package.activations == 0


@pytest.mark.parametrize("wanted", ["fa3", "fa4"])
def test_a_package_that_is_not_there_is_refused_by_name(wanted: Any) -> None:
    match = rf"train\.flash is {wanted}, which is not offered: its package does not work here: .*"
    with pytest.raises(ConfigError, match=match + r"Set train\.flash to torch"):
        flash_kernels(wanted, _device()).__enter__()


def test_so_is_a_torch_without_the_call_and_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not offered: compute is on cpu"):
        flash_kernels("fa3", CpuDevice()).__enter__()
    monkeypatch.delattr(attention, "activate_flash_attention_impl")
    with pytest.raises(ConfigError, match=r"not offered: torch \S+ has no call for it"):
        flash_kernels("fa3", _device()).__enter__()


def test_they_are_there_as_long_as_an_engine_is(package: StandIn) -> None:
    world, batch = world_of(CASE.sort), make_batch(((1, 6),), seed=0)
    simulator = Simulator(policy="early")
    with watched(simulator):
        device = Accelerator(simulator)
        with world.engine(CASE, device=device, flash="fa3") as engine:
            assert package.active
            assert attention.current_flash_attention_impl() == "FA3"
            assert engine.step(batch).loss is not None
    assert (package.active, package.activations) == (False, 1)


def test_a_device_that_does_not_take_them_is_refused_and_has_torchs_own_again(
    package: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("FA3 requires compute capability 9.0")

    monkeypatch.setattr(flash, "scaled_dot_product_attention", refuse)
    world, device = world_of(CASE.sort), _device()
    with pytest.raises(ConfigError, match=r"does not take it: FA3 requires .* 9\.0\. Set train"):
        world.engine(CASE, device=device, flash="fa3")
    assert (package.active, package.activations) == (False, 1)


@pytest.mark.usefixtures("package")
def test_what_documents_know_of_the_kernel_is_asked_again() -> None:
    form = KernelForm(
        device=torch.device("cpu"), dtype=torch.float32, heads=1, key_heads=1, width=8,
        has_window=False,
    )  # fmt: skip
    kernel_runs(form)
    with flash_kernels("fa3", _device()):
        assert kernel_runs.cache_info().currsize == 0
        kernel_runs(form)
        assert kernel_runs.cache_info().currsize == 1
    assert kernel_runs.cache_info().currsize == 0
