"""accelerator.py on a simulated device: copies, memory, lanes. For whole steps: tests/proofs."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megatrain.devices import accelerator
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.engine.compute.layers import Layers
from megatrain.errors import OutOfDeviceMemory
from megatrain.memory import placement
from megatrain.memory.kinds import TensorKind
from megatrain.memory.store import Store
from megatrain.step.ops import DEVICE_LANES, LANES
from testkit.simulated.accelerator import Policy, Simulator
from testkit.simulated.watched import watched
from testkit.worlds import Case, make_batch, world_of

PIECE = 4096
POLICIES: tuple[Policy, ...] = ("late", "early", "random")
TENSORS = {
    "bf16": torch.randn(2, 3, 4).bfloat16(),
    "ids": torch.arange(12).view(3, 4),
    "bool": torch.tensor([[True, False], [False, True]]),
    "transposed": torch.randn(3, 4).t(),
    "a row": torch.randn(4, 6)[1:2],
    "a number": torch.tensor(1.5),
    "empty": torch.zeros(0, 4),
    "not finite": torch.tensor([float("inf"), -0.0]),
}


def device_on(simulator: Simulator, **changes: int) -> AcceleratorDevice:
    return AcceleratorDevice(
        simulator, **{"piece_bytes": PIECE, "ring_buffer_bytes": 100} | changes
    )


@contextmanager
def lane(simulator: Simulator) -> Iterator[None]:
    with watched(simulator), simulator.stream():
        yield


def clean(simulator: Simulator) -> bool:
    return simulator.races == [] and simulator.failures == []


# Copies.


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", TENSORS)
def test_what_is_given_and_brought_back_is_the_same(name: str, policy: Policy) -> None:
    tensor = TENSORS[name]
    simulator = Simulator(policy=policy)
    device = device_on(simulator)
    with lane(simulator):
        pinned = device.pinned(tensor)
        given = device.to_device(pinned)
        brought = device.to_host(given)
        assert simulator.num_syncs == 0  # nobody waited
        simulator.synchronize()
    assert simulator.is_device(given) or tensor.numel() == 0
    for copy in (pinned, brought):
        assert not simulator.is_device(copy)
        assert torch.equal(copy, tensor)
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert copy.data_ptr() != tensor.data_ptr() or tensor.numel() == 0
    assert clean(simulator)


def test_a_value_that_is_read_before_its_op_is_complete_would_be_noticed() -> None:
    simulator = Simulator(policy="late")
    device = device_on(simulator)
    with lane(simulator):
        brought = device.to_host(device.to_device(device.pinned(TENSORS["ids"])))
        early = brought.clone()
        simulator.synchronize()
    assert not torch.equal(early, TENSORS["ids"])
    assert not clean(simulator)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", TENSORS)
def test_what_is_placed_is_there_and_stays(name: str) -> None:
    simulator, tensor = Simulator(policy="late"), TENSORS[name].clone()
    device = device_on(simulator)
    with watched(simulator):
        placed = device.place(tensor)
        expected = tensor.clone()
        tensor.zero_()
        gc.collect()
        with simulator.bypassed:
            assert torch.equal(placed, expected)
    assert simulator.is_device(placed) or tensor.numel() == 0
    assert clean(simulator)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("start", "stop"), [(0, 100), (PIECE - 8, PIECE + 8), (4, 3 * PIECE)])
def test_fills_are_exact_both_ways_and_wait_for_nobody(
    start: int, stop: int, policy: Policy
) -> None:
    """Across pieces too, which one copy could not cross; and of any dtype."""
    simulator = Simulator(policy=policy)
    device = device_on(simulator)
    with lane(simulator):
        arena = device.map_host(4 * PIECE, "weights")
        back = device.map_host(4 * PIECE, "gradients")
        with simulator.bypassed:
            arena.copy_(torch.arange(4 * PIECE) % 251)
        there = device.allocate(stop - start, "weight slots")
        device.copy(there.view(torch.int32), arena[start:stop].view(torch.int32))
        device.copy(back[start:stop], there)
        assert simulator.num_syncs == 0
        simulator.synchronize()
    expected = torch.zeros_like(back)
    expected[start:stop] = arena[start:stop]
    assert torch.equal(back, expected)
    assert clean(simulator)


def test_copies_of_memory_that_was_never_pinned_are_refused() -> None:
    simulator = Simulator()
    device = device_on(simulator)
    with lane(simulator), pytest.raises(AssertionError, match="memory that went through `pin`"):
        device.copy(device.allocate(8, "weight slots"), torch.zeros(8, dtype=torch.uint8))


# Memory.


def test_what_does_not_fit_is_told_by_purpose() -> None:
    simulator = Simulator()
    device = device_on(simulator, cap_bytes=3 << 20)
    held = device.allocate(2 << 20, "weight slots")
    with pytest.raises(
        OutOfDeviceMemory, match=r"^device memory: tape needs 1\.5 MiB, 1\.0 MiB are free$"
    ) as told:
        device.allocate(3 << 19, "tape")
    assert isinstance(told.value.__cause__, torch.OutOfMemoryError)
    device.allocate(1 << 20, "exactly the rest")
    assert held.nbytes == 2 << 20
    assert device.peak_bytes == 3 << 20


def test_host_memory_is_zero_and_registered_until_it_is_taken_back() -> None:
    simulator = Simulator()
    device = device_on(simulator)
    first, second = device.map_host(2 * PIECE + 1, "tape"), device.map_host(PIECE, "gradients")
    assert not first.any()
    assert simulator.registered_bytes == first.nbytes + second.nbytes
    device.unmap_host(first)
    assert simulator.registered_bytes == second.nbytes


@pytest.mark.few(1)
@pytest.mark.parametrize("tape", ["device", "host"])
def test_steps_that_grow_leave_no_old_room_registered(tape: str) -> None:
    """What is mapped later may lie where the old room lay."""
    world = world_of("llama of 2 layers")
    case = Case(sort="llama of 2 layers", steps=(), update="none", tape=tape)  # type: ignore[arg-type]
    simulator = Simulator(policy="early")
    with watched(simulator):
        device = device_on(simulator)
        engine = world.engine(case, device=device)
        at_rest, machine, grown = simulator.registered_bytes, engine._machine, set[int]()
        with engine:
            for length in (3, 8, 20, 8):
                engine.step(make_batch(((1, length),), seed=length))
                room = machine.tape._host._buffer
                needed = 2 * -(-length * 64 // 256) * 256  # of two layers, in bf16, 32 wide
                on_host = 0 if room is None else room.nbytes
                assert on_host >= needed if tape == "host" else on_host == 0
                rooms = machine.inputs._going.nbytes + on_host
                assert simulator.registered_bytes == at_rest + rooms
                grown.add(rooms)
        assert len(grown) == 3
        assert simulator.registered_bytes == 0
    assert clean(simulator)


def test_close_gives_host_memory_back_and_another_engine_may_follow() -> None:
    world = world_of("llama of 2 layers")
    simulator = Simulator()
    device = device_on(simulator)
    arena = world.store.arena(TensorKind.HI)
    for _ in range(2):
        device.pin("weights", arena)
        assert simulator.registered_bytes == arena.nbytes
        device.close()
        assert simulator.registered_bytes == 0


@pytest.mark.parametrize("fails", [False, True])
def test_close_gives_memory_back_and_lifts_the_cap_of_a_device_that_failed_too(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulator = Simulator()
    device = device_on(simulator, cap_bytes=PIECE)
    device.map_host(3 * PIECE, "tape")
    if fails:
        monkeypatch.setattr(simulator, "synchronize", lost)
        with pytest.raises(RuntimeError, match=r"^the device is lost$"):
            device.close()
    else:
        device.close()
    assert simulator.registered_bytes == 0
    assert simulator.empty(2 * PIECE).nbytes == 2 * PIECE  # of another program in this process
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(2 * PIECE, "weight slots")  # it is in use again


def lost() -> None:
    raise RuntimeError("the device is lost")


@pytest.mark.parametrize("number", range(1, 12, 2))
def test_an_engine_that_cannot_be_built_leaves_nothing_registered(number: int) -> None:
    """The allocation of each number fails."""
    world = world_of("llama of 2 layers")
    case = Case(sort="llama of 2 layers", steps=(), update="late", tape="host")
    simulator = Simulator(fails_at_allocation=number)
    with pytest.raises(OutOfDeviceMemory, match=r"^device memory: .* needs") as told:
        world.engine(case, device=device_on(simulator))
    assert simulator.registered_bytes == 0
    assert told.value.snapshot is not None


OTHER_KINDS = (
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
)


@pytest.mark.parametrize("text", OTHER_KINDS)
def test_memory_that_libraries_and_the_driver_lack_is_told_as_ours(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step, when memory is allocated, and when host memory is pinned."""
    world = world_of("llama of 2 layers")
    case = Case(sort="llama of 2 layers", steps=(), update="none")
    simulator = Simulator(policy="early")
    device = device_on(simulator)

    def fail(*_: object) -> Tensor:
        raise RuntimeError(text)

    with watched(simulator):
        engine = world.engine(case, device=device)
        monkeypatch.setattr(Layers, "forward", fail)
        with pytest.raises(OutOfDeviceMemory, match=r"^device memory: the working memory") as told:
            engine.step(make_batch(((1, 6),), seed=0))
        engine.close()
    assert told.value.snapshot["segments"]
    monkeypatch.setattr(simulator, "empty", fail)
    with pytest.raises(OutOfDeviceMemory, match=r"^device memory: tape needs 1\.0 MiB"):
        device.allocate(1 << 20, "tape")
    monkeypatch.setattr(simulator, "pinned", fail)
    with pytest.raises(OutOfDeviceMemory, match=r"^pinned host memory: inputs needs .*container"):
        device.pinned(torch.ones(3))


def test_another_failure_is_not_called_full(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Simulator()
    device = device_on(simulator)
    monkeypatch.setattr(simulator, "empty", lambda num_bytes: lost())
    monkeypatch.setattr(simulator, "pinned", lambda num_bytes: lost())
    with pytest.raises(RuntimeError, match=r"^the device is lost$"):
        device.allocate(1, "tape")
    with pytest.raises(RuntimeError, match=r"^the device is lost$"):
        device.pinned(torch.ones(3))


# Lanes and random numbers.


def test_every_lane_but_those_of_the_host_has_a_stream_of_its_own() -> None:
    lanes = device_on(Simulator()).lanes()
    streams = {lane.name: lane._stream for lane in lanes}
    assert list(streams) == list(LANES)
    assert [streams.pop(name) for name in ("host", "disk")] == [None, None]
    assert None not in streams.values()
    assert list(streams) == list(DEVICE_LANES)
    assert len(set(map(id, streams.values()))) == len(DEVICE_LANES)


def test_host_memory_and_lanes_are_where_the_placement_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = frozenset({min(os.sched_getaffinity(0))})
    spread = placement.Policy(mode="interleave", nodes=(0, 1))
    near = placement.Node(number=1, cores=core, free_bytes=4 * PIECE)
    decided = placement.Placement(kept=spread, near=near, lane_cores=core, update_cores=core)
    asked: list[placement.Policy] = []
    monkeypatch.setattr(accelerator, "find_placement", lambda address: decided)
    monkeypatch.setattr(placement.Policy, "apply", lambda policy, *_: asked.append(policy))
    device = device_on(Simulator())
    assert {lane._cores for lane in device.lanes()} == {core}
    arenas = [device.map_host(num_bytes, "tape") for num_bytes in (PIECE, PIECE + 1)]
    assert asked == [placement.Policy(mode="prefer", nodes=(1,)), spread]
    for arena in arenas:
        device.unmap_host(arena)
    layout = world_of("llama of 2 layers").store.layout
    asked.clear()
    Store(layout, placement=device.placement)
    assert asked == [spread] * len(layout.kinds), "all are larger than a fourth of the node"


def test_a_seed_decides_what_is_drawn_and_the_callers_draws_go_on() -> None:
    device = device_on(Simulator())

    def drawn(seed: int) -> Tensor:
        device.seed(seed)
        return torch.rand(3)

    state = device.random_state()
    first = torch.rand(3)
    assert torch.equal(drawn(5), drawn(5))
    assert not torch.equal(drawn(5), drawn(6))
    device.set_random_state(state)
    assert torch.equal(torch.rand(3), first)


# Threads.


@pytest.mark.parametrize("forgets", ["nobody", "lane host", "the caller"])
def test_every_thread_sets_the_device_before_it_asks_it(
    forgets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not would make a context on the first device, whichever is the engine's."""
    set_device = Simulator.set_device

    def unless_it_forgets(simulator: Simulator) -> None:
        if threading.current_thread().name != forgets:
            set_device(simulator)

    monkeypatch.setattr(Simulator, "set_device", unless_it_forgets)
    simulator = Simulator(policy="late")
    case = Case(sort="llama of 2 layers", steps=(), update="late")
    with (
        watched(simulator),
        world_of(case.sort).engine(case, device=AcceleratorDevice(simulator)) as own,
    ):

        def step() -> None:
            with simulator.default:
                own.step(make_batch(((1, 6),), seed=0))
                own.synchronize()

        caller = threading.Thread(target=step, name="the caller")
        caller.start()
        caller.join()
    assert not simulator.failures
    stray = f"{forgets} asks an event and never set the device"
    assert set(simulator.races) == (set() if forgets == "nobody" else {stray})
