"""Laws of pinning.py: what the system allows is registered, and staged copies are exact."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from megatrain.devices import pinning
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.device import copy_bits
from megatrain.devices.pinning import (
    RING_BUFFERS,
    SHARE_BYTES,
    Registry,
    Ring,
    tell_refusal,
)
from megatrain.devices.runtime import NO_WAY, PINNING_CAUSES, PinningFailed
from testkit.patience import HANG_S
from testkit.simulated.accelerator import Policy, Simulator
from testkit.simulated.watched import watched

PIECE = 4096
BUFFER = 100
SIZES = [1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 5 * PIECE + 17]
POLICIES: tuple[Policy, ...] = ("late", "early", "random")


def arena_of(num_bytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def ring_of(simulator: Simulator, num_bytes: int = BUFFER) -> Ring:
    return Ring(simulator, [simulator.pinned(num_bytes) for _ in range(RING_BUFFERS)])


def spans(simulator: Simulator) -> list[tuple[int, int]]:
    """Return what is registered, in order."""
    return sorted(simulator._registered.items())


# Law 1: exactly the arena's bytes, each once.


@pytest.mark.parametrize("num_bytes", SIZES)
def test_exactly_the_arenas_bytes_are_registered_each_once(num_bytes: int) -> None:
    simulator, arena = Simulator(), arena_of(num_bytes)
    Registry(simulator, PIECE).register("weights", arena)
    found = spans(simulator)
    assert found[0][0] == arena.data_ptr()
    assert found[-1][1] == arena.data_ptr() + num_bytes
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(found))
    assert all(stop - start <= PIECE for start, stop in found)
    assert len(found) == -(-num_bytes // PIECE)
    assert simulator.registered_bytes == num_bytes


def test_pieces_are_registered_in_parallel() -> None:
    """Each waits until another one is under way too."""
    both = threading.Barrier(2)

    class Slow(Simulator):
        def register(self, address: int, num_bytes: int) -> None:
            both.wait(HANG_S)
            super().register(address, num_bytes)

    simulator = Slow()
    Registry(simulator, PIECE).register("weights", arena_of(4 * PIECE))
    assert simulator.registered_bytes == 4 * PIECE


def test_close_and_unregister_leave_what_was_never_theirs() -> None:
    simulator = Simulator()
    registry = Registry(simulator, PIECE)
    first, second = arena_of(3 * PIECE + 5), arena_of(2 * PIECE)
    registry.register("weights", first)
    registry.register("weights", second)
    registry.unregister(first)
    assert simulator.registered_bytes == second.nbytes
    assert registry.pieces(first) is None
    assert registry.pieces(second) == [slice(0, PIECE), slice(PIECE, 2 * PIECE)]
    registry.unregister(first)  # not registered, nor would it be after a refusal
    registry.register("weights", first)
    registry.close()
    assert simulator.registered_bytes == 0
    assert registry.pieces(second) is None
    registry.close()


# Law 2: a refusal at any piece ends the registering, keeps what is registered, and copies exact.

NUM_PIECES = 6


@pytest.mark.parametrize("refused", range(1, NUM_PIECES + 1))
def test_a_refusal_at_any_piece_keeps_what_is_registered(
    refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "NUM_THREADS", 1)
    simulator = Simulator(fails_at_registration=1 + refused)
    registry = Registry(simulator, PIECE)
    before, arena = arena_of(PIECE), arena_of(NUM_PIECES * PIECE - 9)
    assert registry.register("weights", before) is None
    refusal = registry.register("weights", arena)
    assert str(refusal) == "the simulator was told to refuse"
    assert simulator.num_registrations == 1 + refused  # none was tried after it
    assert simulator.registered_bytes == PIECE + (refused - 1) * PIECE
    cuts = registry.pieces(arena)
    assert cuts is not None
    assert [registry.was_refused(arena[cut]) for cut in cuts] == [
        number >= refused for number in range(1, NUM_PIECES + 1)
    ]
    assert not registry.was_refused(before)
    assert registry.unregister(arena) == []
    assert simulator.registered_bytes == PIECE
    assert registry.register("weights", arena) is None  # the system may have changed its mind
    assert simulator.registered_bytes == before.nbytes + arena.nbytes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("refused", range(1, NUM_PIECES + 1))
def test_copies_of_a_refused_arena_are_exact(refused: int, policy: Policy) -> None:
    simulator = Simulator(policy=policy, fails_at_registration=refused)
    device = AcceleratorDevice(simulator, piece_bytes=PIECE, ring_buffer_bytes=BUFFER)
    arena, back = arena_of(NUM_PIECES * PIECE - 9), arena_of(NUM_PIECES * PIECE - 9, seed=1)
    with lane(simulator):
        with pytest.warns(UserWarning, match="not all of weights, .* can be pinned"):
            device.pin("weights", arena)
        device.pin("gradients", back)
        there = device.allocate(arena.nbytes, "weight slots")
        device.copy(there, arena)
        device.copy(back, there)
        simulator.synchronize()
    assert torch.equal(back, arena)
    assert simulator.races == []
    assert simulator.registered_bytes >= back.nbytes


def test_a_refused_piece_that_is_taken_for_registered_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver makes the host wait for such a copy."""
    monkeypatch.setattr(Registry, "was_refused", lambda registry, piece: False)
    simulator = Simulator(policy="late", fails_at_registration=1)
    device = AcceleratorDevice(simulator, piece_bytes=PIECE, ring_buffer_bytes=BUFFER)
    arena = arena_of(PIECE)
    with lane(simulator):
        with pytest.warns(UserWarning, match="can be pinned"):
            device.pin("weights", arena)
        device.copy(device.allocate(PIECE, "weight slots"), arena)
    assert simulator.num_syncs > 0


# Law 4: all that was registered is unregistered.


class Stubborn(Simulator):
    """Keeps the piece of one address."""

    kept = 0

    def unregister(self, address: int) -> None:
        if address == self.kept:
            raise PinningFailed("cudaHostUnregister: invalid argument (error 1)")
        super().unregister(address)


def test_what_the_driver_keeps_keeps_nothing_else_and_is_told() -> None:
    simulator, arena = Stubborn(), arena_of(3 * PIECE)
    device = AcceleratorDevice(simulator, piece_bytes=PIECE)
    device.pin("weights", arena)
    simulator.kept = arena.data_ptr()
    with pytest.warns(UserWarning, match=r"1 pieces stay pinned \(cudaHostUnregister: invalid"):
        device.close()
    assert simulator.registered_bytes == PIECE
    device.close()  # once


# Where copies are cut.


@pytest.mark.parametrize(
    ("start", "stop", "cuts"),
    [
        (0, 10, [(0, 10)]),
        (0, PIECE, [(0, PIECE)]),
        (PIECE, 2 * PIECE, [(0, PIECE)]),
        (PIECE - 1, PIECE + 1, [(0, 1), (1, 2)]),
        (5, 2 * PIECE + 7, [(0, PIECE - 5), (PIECE - 5, 2 * PIECE - 5), (2 * PIECE - 5, 2 * PIECE + 2)]),  # noqa: E501
        (3 * PIECE - 3, 3 * PIECE + 17, [(0, 3), (3, 20)]),
        (7, 7, []),
    ],
)  # fmt: skip
def test_copies_are_cut_at_the_borders_of_pieces(
    start: int, stop: int, cuts: list[tuple[int, int]]
) -> None:
    registry, arena = Registry(Simulator(), PIECE), arena_of(3 * PIECE + 17)
    registry.register("weights", arena)
    assert registry.pieces(arena[start:stop]) == [slice(*cut) for cut in cuts]


def test_unknown_memory_has_no_pieces() -> None:
    registry, memory = Registry(Simulator(), PIECE), arena_of(8 * PIECE)
    assert registry.pieces(memory) is None
    registry.register("weights", memory[2 * PIECE : 4 * PIECE])
    known = registry.pieces(memory[2 * PIECE : 4 * PIECE])
    assert known == [slice(0, PIECE), slice(PIECE, 2 * PIECE)]
    for unknown in (
        memory[:PIECE],
        memory[5 * PIECE :],
        memory[PIECE : 3 * PIECE],  # its begin
        memory[3 * PIECE : 5 * PIECE],  # its end
        memory[4 * PIECE : 4 * PIECE + 1],
    ):
        assert registry.pieces(unknown) is None


# Law 3: staged copies reuse no buffer that the device still uses.

AROUND = sorted(
    {max(0, times * BUFFER + more) for times in (0, 1, 2, 3, 4, 7) for more in (-1, 0, 1)}
)


@contextmanager
def lane(simulator: Simulator) -> Iterator[None]:
    """Queue what follows on a stream, and see what host threads touch."""
    with watched(simulator), simulator.stream():
        yield


def sent_and_received(simulator: Simulator, sources: list[Tensor]) -> list[Tensor]:
    """Send each to the device, one directly behind the other, and bring all back."""
    inbound, outbound = ring_of(simulator), ring_of(simulator)
    targets = [torch.zeros_like(source) for source in sources]
    with lane(simulator):
        there = [simulator.empty(source.nbytes) for source in sources]
        for device, source in zip(there, sources, strict=True):
            inbound.send(device, source)
            source.zero_()  # read when `send` returns
        found = []
        for device, target in zip(there, targets, strict=True):
            outbound.receive(target, device)
            found.append(target.tolist())  # there when `receive` returns
        simulator.synchronize()
    return [torch.tensor(values, dtype=torch.uint8) for values in found]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_bytes", AROUND)
def test_staged_copies_are_exact_around_the_size_of_a_buffer(
    num_bytes: int, policy: Policy
) -> None:
    simulator = Simulator(num_bytes, policy)
    expected = [arena_of(num_bytes, seed) for seed in range(3)]
    found = sent_and_received(simulator, [source.clone() for source in expected])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert simulator.races == []
    assert simulator.failures == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_ring_that_does_not_wait_for_its_buffer_would_be_noticed(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the order of accesses, though a fast device gives the right bytes nevertheless."""
    monkeypatch.setattr(Ring, "_await", lambda ring, number: None)
    fits, exceeds = Simulator(policy=policy), Simulator(policy=policy)
    for simulator, num_buffers in ((fits, RING_BUFFERS), (exceeds, RING_BUFFERS + 1)):
        ring, source = ring_of(simulator), arena_of(num_buffers * BUFFER)
        with lane(simulator):
            ring.send(simulator.empty(source.nbytes), source)
            simulator.synchronize()
    assert fits.races == []
    assert any("copy on the host" in race and "writes" in race for race in exceeds.races)


def test_a_receive_that_does_not_wait_for_the_device_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ring, "_await", lambda ring, number: None)
    simulator = Simulator(policy="late")
    expected = arena_of(BUFFER)
    (found,) = sent_and_received(simulator, [expected.clone()])
    assert any("copy on the host" in race and "reads" in race for race in simulator.races)
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("more", [0, 1, SHARE_BYTES + 3])
def test_large_buffers_are_moved_by_several_threads(
    more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []

    def counted(target: Tensor, source: Tensor) -> None:
        moved.append(threading.get_ident())
        copy_bits(target, source)

    monkeypatch.setattr(pinning, "copy_bits", counted)
    simulator, source = Simulator(policy="early"), arena_of(2 * SHARE_BYTES + more)
    target = torch.zeros_like(source)
    with simulator.stream():
        there = simulator.empty(source.nbytes)
        ring_of(simulator, source.nbytes).send(there, source)
        ring_of(simulator, source.nbytes).receive(target, there)
        simulator.synchronize()
    assert torch.equal(target, source)
    assert len(moved) >= 4
    assert threading.get_ident() not in moved


# What is told.


@pytest.mark.parametrize("advice", [PINNING_CAUSES, NO_WAY])
def test_what_could_not_be_pinned_is_told_in_one_line_with_what_helps(advice: str) -> None:
    with pytest.warns(UserWarning, match="host memory") as told:
        tell_refusal("weights", torch.empty(3 << 20), PinningFailed("why", advice), 192 << 20)
    (warning,) = told
    assert str(warning.message) == (
        "host memory: not all of weights, 12.0 MiB, can be pinned (why); the copies of the rest "
        "use 192.0 MiB of pinned buffers, with one more pass over host memory each. "
        f"{advice}."
    )
    assert "ulimit" not in str(warning.message)  # drivers pin beyond that limit


def test_it_is_told_once_whatever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Simulator()

    def refuse(address: int, num_bytes: int) -> None:
        raise PinningFailed("no more")

    monkeypatch.setattr(simulator, "register", refuse)
    device = AcceleratorDevice(simulator, ring_buffer_bytes=BUFFER)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for name in ("weights", "gradients", "tape"):
            device.pin(name, arena_of(PIECE))
        device.map_host(PIECE, "tape")
    (warning,) = told
    assert str(warning.message).startswith("host memory: not all of weights, 0.0 MiB, can be")
