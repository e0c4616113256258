"""accelerator.py on a simulated device: copies, memory, lanes. For whole steps: tests/proofs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megatrain.devices.accelerator import Accelerator
from megatrain.errors import DeviceFull
from megatrain.memory.kinds import Kind
from megatrain.step.ops import LANES
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


def device_on(simulator: Simulator, **changes: int) -> Accelerator:
    return Accelerator(simulator, **{"piece_bytes": PIECE, "ring_buffer_bytes": 100} | changes)


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


def test_a_copy_that_is_not_cut_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Simulator()
    device = device_on(simulator)
    with lane(simulator):
        arena = device.map_host(2 * PIECE, "weights")
        there = device.allocate(2 * PIECE, "weight slots")
        monkeypatch.setattr(device._registry, "pieces", lambda tensor: [slice(0, tensor.nbytes)])
        with pytest.raises(AssertionError, match="a copy across two registered pieces"):
            device.copy(there, arena)


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
        DeviceFull, match=r"^device memory: tape needs 1\.5 MiB, 1\.0 MiB are free$"
    ) as told:
        device.allocate(3 << 19, "tape")
    assert isinstance(told.value.__cause__, torch.OutOfMemoryError)
    device.allocate(1 << 20, "exactly the rest")
    assert held.nbytes == 2 << 20
    assert device.peak_bytes == 3 << 20


def test_what_compute_made_is_kept_as_it_is() -> None:
    simulator = Simulator()
    hidden = simulator.empty(64)
    assert device_on(simulator).counted(hidden, "hidden states") is hidden


def test_host_memory_is_zero_and_registered_until_it_is_taken_back() -> None:
    simulator = Simulator()
    device = device_on(simulator)
    first, second = device.map_host(2 * PIECE + 1, "tape"), device.map_host(PIECE, "gradients")
    assert not first.any()
    assert simulator.registered_bytes == first.nbytes + second.nbytes
    device.unmap_host(first)
    assert simulator.registered_bytes == second.nbytes


@pytest.mark.parametrize("tape", ["device", "host"])
def test_steps_that_grow_leave_no_old_room_registered(tape: str) -> None:
    """What is mapped later may lie where the old room lay."""
    world = world_of("llama of 2 layers")
    case = Case(sort="llama of 2 layers", steps=(), update="none", tape=tape)  # type: ignore[arg-type]
    simulator = Simulator(policy="early")
    with watched(simulator):
        device = device_on(simulator)
        engine = world.engine(case, device=device)
        at_rest, largest = simulator.registered_bytes, 0
        with engine:
            for length in (3, 8, 20, 8):
                engine.step(make_batch(((1, length),), seed=length))
                room = 2 * -(-length * 64 // 256) * 256  # of two layers, in bf16, 32 wide
                largest = max(largest, room if tape == "host" else 0)
                assert simulator.registered_bytes == at_rest + largest
        assert simulator.registered_bytes == 0
    assert clean(simulator)


def test_close_gives_host_memory_back_and_another_engine_may_follow() -> None:
    world = world_of("llama of 2 layers")
    simulator = Simulator()
    device = device_on(simulator)
    arena = world.store.arena(Kind.HI)
    for _ in range(2):
        device.pin("weights", arena)
        assert simulator.registered_bytes == arena.nbytes
        device.close()
        assert simulator.registered_bytes == 0


# Lanes and random numbers.


def test_every_lane_but_those_of_the_host_has_a_stream_of_its_own() -> None:
    lanes = device_on(Simulator()).lanes()
    streams = {lane.name: lane._stream for lane in lanes}
    assert list(streams) == list(LANES)
    assert [streams.pop(name) for name in ("host", "disk")] == [None, None]
    assert None not in streams.values()
    assert len(set(map(id, streams.values()))) == 3


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
