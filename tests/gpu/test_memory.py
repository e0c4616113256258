"""L5 on an accelerator: device memory is bounded by the plan, and a cap is a law.

On real hardware the cap counts what torch's allocator holds, in pieces of megabytes; the models
here are large enough for that to matter little.
"""

from __future__ import annotations

import functools
import gc
import threading
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.engine.engine import Engine
from megatrain.errors import OutOfDeviceMemory, PlayerStopped
from testkit.states import same, state_of
from testkit.worlds import SIZES, Case, Sort, World, make_batch
from tests.gpu.rigs import RealRig, Rig, SimulatedRig, play

SHAPES = ((1, 8), (2, 6))
CASE = Case(sort="", steps=(SHAPES,), update="late", tape="host")
MIB = 1 << 20


@functools.cache
def world_of(num_layers: int, width: int = 256) -> World:
    sizes = SIZES | {"hidden_size": width, "intermediate_size": 4 * width}
    config = functools.partial(
        LlamaConfig, **sizes, num_hidden_layers=num_layers, tie_word_embeddings=False
    )
    return World(Sort(config=config))


def peak_bytes(rig: Rig, num_layers: int, case: Case = CASE) -> int:
    world = world_of(num_layers)
    with rig.running(world.store, seed=1) as accelerator:
        play(rig, world, case, accelerator)
        return rig.peak_bytes()


@pytest.mark.merge
@pytest.mark.parametrize("depths", [(3, 9), pytest.param((8, 64), marks=pytest.mark.thorough)])
def test_the_peak_does_not_grow_with_depth(rig: Rig, depths: tuple[int, int]) -> None:
    shallow, deep = (peak_bytes(rig, depth) for depth in depths)
    assert shallow > 5 * MIB
    assert deep == pytest.approx(shallow, rel=0.02)


@pytest.mark.merge
def test_equal_runs_have_equal_peaks(rig: Rig) -> None:
    case = Case(sort="", steps=(((4, 32),),), update="none", tape="device")
    assert len({peak_bytes(rig, 3, case) for _ in range(6)}) == 1


def test_gradients_are_computed_by_the_thread_of_the_lane(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd's own thread would free what it made after the op: peaks would differ by chance."""
    differentiate, threads = torch.autograd.grad, set[tuple[str, bool]]()

    def noting(*args: Any, **kwargs: Any) -> Any:
        several = torch._C._is_multithreading_enabled()
        threads.add((threading.current_thread().name, several))
        return differentiate(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", noting)
    peak_bytes(rig, 3)
    assert threads == {("lane compute", False)}
    assert torch._C._is_multithreading_enabled(), "the caller's own gradients are as they were"


@pytest.mark.few(1)
def test_it_runs_under_a_cap_that_is_enough(rig: Rig) -> None:
    world = world_of(3)
    with rig.running(world.store, seed=1) as accelerator:
        expected = play(rig, world, CASE, accelerator)
        enough = rig.needed_bytes()
    with rig.running(world.store, seed=1, cap_bytes=enough) as accelerator:
        assert play(rig, world, CASE, accelerator).differences(expected) == []
        assert rig.peak_bytes() <= enough
        assert accelerator.peak_bytes <= enough


def test_what_does_not_fit_is_named(rig: Rig) -> None:
    world = world_of(3)
    with rig.running(world.store) as accelerator:
        rig.runtime.limit(held_bytes(rig) + 5 * MIB // 2)
        with pytest.raises(
            OutOfDeviceMemory,
            match=r"^device memory: weight slots needs 1\.5 MiB, [\d.]+ MiB are free$",
        ):
            world.engine(CASE, device=accelerator)


def test_buffers_that_do_not_fit_are_named() -> None:
    accelerator = SimulatedRig().bare(cap_bytes=100)
    accelerator.place(torch.ones(10))
    with pytest.raises(OutOfDeviceMemory, match=r"^device memory: the model's buffers needs "):
        accelerator.place(torch.ones(100))


def late_engine(rig: Rig, world: World, accelerator: AcceleratorDevice) -> Engine:
    return world.engine(CASE, device=accelerator, optimizer=rig.optimizer(world), tape="device")


@pytest.mark.merge
@pytest.mark.parametrize(
    "share", [0.5, *(pytest.param(s, marks=pytest.mark.thorough) for s in (0.0, 0.2, 0.8))]
)
def test_out_of_memory_in_a_step_leaves_the_store_as_it_was(rig: Rig, share: float) -> None:
    """`share` of the memory that compute needs beside what stays is there."""
    world = world_of(3)
    batches = [make_batch(((32, 24),), seed=seed) for seed in (1, 2, 3)]
    with rig.running(world.store) as accelerator:
        with late_engine(rig, world, accelerator) as engine:
            engine.step(batches[0])
            kept_and_needed(rig)
            engine.step(batches[1])
            engine.synchronize()
            staying, most = kept_and_needed(rig)
            before = state_of(world)
            rig.runtime.limit(int(staying + share * (most - staying)))
            with pytest.raises(
                OutOfDeviceMemory,
                match=r"^device memory: the working memory of compute does not fit \(raised in "
                r"lane compute, at .*\)\. Smaller micro-batches, or fewer slots, leave more room$",
            ):
                engine.step(batches[2])
            assert not engine.weights_inconsistent
        assert same(before, state_of(world))
    # A new engine goes on from there.
    with (
        rig.running(world.store) as accelerator,
        Engine(
            world.decoder,
            world.store,
            device=accelerator,
            optimizer=rig.optimizer(world),
        ) as engine,
    ):
        assert engine.step(batches[2]).applied
    assert not same(before, state_of(world))


def test_a_closed_engine_holds_no_device_memory(rig: Rig) -> None:
    """Though its name is still bound: another engine may follow it in the same function."""
    world = world_of(3)
    batch = make_batch(((32, 24),), seed=1)
    with rig.running(world.store) as accelerator:
        engine = late_engine(rig, world, accelerator)
        first = rig.live_bytes()
        engine.step(batch)
        assert first > MIB
        engine.close()
        gc.collect()
        assert rig.live_bytes() == 0
        assert engine.is_consistent
        assert set(engine.num_updates.values()) == {1}
        with pytest.raises(PlayerStopped, match=r"^the engine is closed; create a new one$"):
            engine.step(batch)
        engine.close()


def kept_and_needed(rig: Rig) -> tuple[int, int]:
    """Return what stays between steps and what they needed since this was asked last.

    Both as a cap counts them. The first step needs more than those after it: it asks the device.
    """
    if isinstance(rig, RealRig):
        most = torch.accelerator.memory_reserved(rig.torch_device)
        torch.accelerator.empty_cache()
        return held_bytes(rig), most
    return held_bytes(rig), rig.peak_bytes()


def held_bytes(rig: Rig) -> int:
    """Return what counts against a cap now."""
    if isinstance(rig, RealRig):
        return torch.accelerator.memory_reserved(rig.torch_device)
    return rig.live_bytes()
