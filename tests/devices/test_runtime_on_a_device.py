"""runtime.py and accelerator.py on testkit/host_gpu: what the process shares, and gives back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

pytest.importorskip("testkit.host_gpu", exc_type=ImportError)

from megatrain.devices import runtime as runtime_module
from megatrain.devices.accelerator import AcceleratorDevice, accelerator
from megatrain.devices.runtime import PinningFailed, TorchRuntime, grouped_products_run
from megatrain.errors import OutOfDeviceMemory
from testkit.host_gpu import control
from testkit.host_gpu.cudart import pending_error
from testkit.worlds import Case, world_of

pytestmark = pytest.mark.hostgpu
MIB = 1 << 20


def test_memory_that_the_allocator_keeps_is_free() -> None:
    device = accelerator("hostgpu")
    before = device.free_bytes
    held = device.allocate(256 * MIB, "weight slots")
    assert device.free_bytes <= before - 256 * MIB
    del held
    assert torch.accelerator.memory_reserved(0) >= 256 * MIB  # kept
    assert device.free_bytes == before


def test_memory_facts_have_the_peak_since_it_was_forgotten() -> None:
    device, runtime = accelerator("hostgpu"), TorchRuntime.find("hostgpu")
    device.allocate(64 * MIB, "dropped")
    runtime.forget_peak()
    before = runtime.memory_facts()
    held = device.allocate(32 * MIB, "weight slots")
    after = runtime.memory_facts()
    assert after["peak_allocated_bytes"] == before["peak_allocated_bytes"] + 32 * MIB
    assert after["peak_reserved_bytes"] >= after["peak_allocated_bytes"]
    assert 0 < after["driver_free_bytes"] <= after["total_bytes"]
    del held
    device.close()


@pytest.mark.parametrize("kept_mib", [0, 48])
def test_a_cap_counts_what_is_used_not_what_is_kept(kept_mib: int) -> None:
    device = accelerator("hostgpu", cap_bytes=64 * MIB)
    if kept_mib:
        device.allocate(kept_mib * MIB, "dropped")
    assert device.free_bytes == 64 * MIB
    device.close()


def test_a_cap_ends_with_its_accelerator() -> None:
    capped = accelerator("hostgpu", cap_bytes=64 * MIB)
    with pytest.raises(OutOfDeviceMemory, match=r"tape needs 128\.0 MiB, 64\.0 MiB are free"):
        capped.allocate(128 * MIB, "tape")
    capped.close()
    other = accelerator("hostgpu")
    assert other.free_bytes > 1024 * MIB
    assert other.allocate(128 * MIB, "tape").nbytes == 128 * MIB


def test_a_cap_that_comes_later_is_the_least_of_both_and_memory_is_counted() -> None:
    device = accelerator("hostgpu:1", cap_bytes=64 * MIB)
    device.cap(128 * MIB)
    assert device.free_bytes == 64 * MIB
    device.cap(32 * MIB)
    assert device.free_bytes == 32 * MIB
    held = device.allocate(24 * MIB, "tape")
    assert device.peak_bytes >= held.nbytes
    device.close()


def test_a_runtime_seeds_its_own_device_and_the_host_whatever_the_threads_device_is() -> None:
    runtime = TorchRuntime.find("hostgpu:1")
    torch.accelerator.set_device_index(0)
    others = torch.get_device_module("hostgpu").get_rng_state(0)

    def drawn() -> tuple[list[float], list[float]]:
        return torch.rand(3, device="hostgpu:1").cpu().tolist(), torch.rand(3).tolist()

    state = runtime.random_state()
    first = drawn()
    runtime.seed(7)
    seeded = drawn()
    assert seeded != drawn()
    runtime.seed(7)
    assert drawn() == seeded
    runtime.set_random_state(state)
    assert drawn() == first
    assert torch.equal(torch.get_device_module("hostgpu").get_rng_state(0), others)
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.parametrize("seeds_host", [True, False])
def test_layers_that_draw_on_the_host_draw_the_same_in_recompute(
    seeds_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that are left out by chance, as some models do it."""
    if not seeds_host:
        of_device = torch.get_device_module("hostgpu").manual_seed
        monkeypatch.setattr(TorchRuntime, "seed", lambda runtime, seed: of_device(seed))
    forward, drawn = LlamaMLP.forward, {False: list[float](), True: list[float]()}

    def by_chance(module: LlamaMLP, hidden: torch.Tensor) -> Any:
        share = float(torch.rand([]))
        drawn[torch.is_grad_enabled()].append(share)
        return forward(module, hidden) * share

    monkeypatch.setattr(LlamaMLP, "forward", by_chance)
    world = world_of("llama of 2 layers")
    case = Case(sort="llama of 2 layers", steps=(((1, 4), (2, 3)), ((1, 5),)), update="late")
    world.play(case, device=accelerator("hostgpu"), lanes=None)
    assert len(drawn[True]) == 6
    assert (sorted(drawn[False]) == sorted(drawn[True])) is seeds_host


def test_allocating_in_many_threads_leaves_the_users_switch_as_it_was() -> None:
    settings: Any = torch.utils.deterministic
    runtime = TorchRuntime.find("hostgpu")
    before, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, True
    both = threading.Barrier(4)

    def allocate() -> None:
        both.wait()
        for _ in range(500):
            runtime.empty(64)

    threads = [threading.Thread(target=allocate) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, before
    assert left


def test_a_failed_registration_is_named_and_not_left_pending() -> None:
    runtime, memory = TorchRuntime.find("hostgpu"), torch.zeros(1 << 16, dtype=torch.uint8)
    runtime.register(memory.data_ptr(), memory.nbytes)
    with pytest.raises(PinningFailed, match=r"^cudaHostRegister: part or all .* \(error 712\)$"):
        runtime.register(memory.data_ptr(), memory.nbytes)
    runtime.unregister(memory.data_ptr())
    with pytest.raises(PinningFailed, match=r"^cudaHostUnregister: pointer .* \(error 713\)$"):
        runtime.unregister(memory.data_ptr())
    assert pending_error() == 0


def test_close_unregisters_where_the_device_has_failed() -> None:
    device = accelerator("hostgpu")
    before = control.registered_bytes()
    device.map_host(1 << 16, "tape")
    assert control.registered_bytes() == before + (1 << 16)
    table, outside = torch.ones(4, 2, device="hostgpu"), torch.tensor([9]).to("hostgpu")
    torch.nn.functional.embedding(outside, table)
    with pytest.raises(RuntimeError):
        device.close()
    assert control.registered_bytes() == before
    control.start_anew()


def test_only_what_is_refused_is_staged() -> None:
    """Large enough for several threads to move it."""
    device = AcceleratorDevice(TorchRuntime.find("hostgpu"), piece_bytes=4 * MIB)
    arena = torch.arange(16 * MIB, dtype=torch.int32).view(torch.uint8)[: 16 * MIB]
    back = torch.zeros_like(arena)
    before = control.registered_bytes()
    control.refuse_registration_at(3)
    with pytest.warns(UserWarning, match=r"not all of weights, .*out of memory"):
        device.pin("weights", arena)
    assert control.registered_bytes() - before in range(8 * MIB, 16 * MIB)
    device.pin("gradients", back)
    there = device.allocate(16 * MIB, "weight slots")
    device.copy(there, arena)
    device.copy(back, there)
    device.close()
    assert torch.equal(back, arena)
    assert control.registered_bytes() == before


def test_a_driver_that_does_not_tell_free_memory_has_what_torch_has_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = TorchRuntime.find("hostgpu:1")
    told, known = runtime.free_bytes(), runtime._module.get_device_properties()
    monkeypatch.setattr(runtime._module, "get_device_properties", lambda device: known)

    def refuses(*_: object) -> None:
        raise RuntimeError("The device doesn't support querying the available free memory.")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuses)
    assert runtime.free_bytes() == told
    device = AcceleratorDevice(runtime, cap_bytes=64 * MIB)
    assert device.free_bytes <= 64 * MIB
    device.close()


def test_products_of_groups_are_tried_once_where_torch_has_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """hostgpu has none: torch would loop. It can be called all the same."""
    runtime = TorchRuntime.find("hostgpu:1")
    grouped_products_run.cache_clear()
    calls: list[None] = []
    multiply = torch._grouped_mm

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(None)
        return multiply(*given, **named)

    monkeypatch.setattr(torch, "_grouped_mm", counted)
    assert not runtime.groups(torch.bfloat16)
    assert not calls
    monkeypatch.setattr(runtime_module, "has_grouped_kernel", lambda device: True)
    assert runtime.groups(torch.bfloat16)
    assert runtime.groups(torch.bfloat16)
    assert not runtime.groups(torch.float32)
    assert len(calls) == 1


@pytest.mark.parametrize("error", [RuntimeError("no kernel image"), NotImplementedError("none")])
def test_a_kernel_of_groups_that_fails_is_not_used(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    runtime = TorchRuntime.find("hostgpu:1")
    monkeypatch.setattr(runtime_module, "has_grouped_kernel", lambda device: True)
    monkeypatch.setattr(torch, "_grouped_mm", fails)
    grouped_products_run.cache_clear()
    assert not runtime.groups(torch.bfloat16)
    grouped_products_run.cache_clear()


def test_a_full_device_does_not_say_that_it_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "_grouped_mm", fails)
    grouped_products_run.cache_clear()
    with pytest.raises(torch.OutOfMemoryError):
        grouped_products_run(torch.device("hostgpu:1"), torch.bfloat16)


def test_memory_is_allocated_pinned_only_where_none_can_be_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not TorchRuntime.find("hostgpu:1").allocates
    with control.without_registration():
        runtime = TorchRuntime.find("hostgpu:1")
        assert runtime.allocates
        with pytest.raises(PinningFailed, match="torch cannot register host memory for hostgpu"):
            runtime.register(4096, 4096)
        device = AcceleratorDevice(runtime, "hostgpu:1")
        arena = device.map_host(5 * MIB + 3, "tape")
        assert arena.is_pinned()
        assert arena.data_ptr() % 4096 == 0
        assert not arena.any()
        assert device._registry.pieces(arena) == [slice(0, arena.nbytes)]
        there = device.allocate(arena.nbytes, "tape")
        arena.random_(0, 256)
        back = device.map_host(arena.nbytes, "tape")
        device.copy(there, arena)
        device.copy(back, there)
        device.synchronize()
        assert torch.equal(back, arena)
        device.unmap_host(back)
        device.close()

        def rounds(settings: str) -> None:
            raise RuntimeError(f"Unrecognized key in {settings}")

        monkeypatch.setattr(runtime_module, "set_allocator", rounds)
        assert not TorchRuntime.find("hostgpu:1").allocates
