"""Laws of pinning.py: an arena is registered whole or not at all; staged copies are exact."""

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
from megatrain.devices.accelerator import Accelerator
from megatrain.devices.pinning import RING_BUFFERS, Registry, Ring, tell
from megatrain.devices.runtime import PinningFailed
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


def spans(simulator: Simulator) -> list[tuple[int, int]]:
    """Return what is registered, in order."""
    return sorted(simulator._registered.items())


# Law 1: exactly the arena's bytes, each once.


@pytest.mark.parametrize("num_bytes", SIZES)
def test_exactly_the_arenas_bytes_are_registered_each_once(num_bytes: int) -> None:
    simulator, arena = Simulator(), arena_of(num_bytes)
    Registry(simulator, PIECE).register(arena)
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
    Registry(simulator, PIECE).register(arena_of(4 * PIECE))
    assert simulator.registered_bytes == 4 * PIECE


def test_an_empty_arena_is_registered_by_doing_nothing() -> None:
    simulator = Simulator()
    registry = Registry(simulator, PIECE)
    registry.register(arena_of(0))
    assert simulator.num_registrations == 0
    assert registry.pieces(arena_of(0)) == []


def test_close_and_unregister_leave_what_was_never_theirs() -> None:
    simulator = Simulator()
    registry = Registry(simulator, PIECE)
    first, second = arena_of(3 * PIECE + 5), arena_of(2 * PIECE)
    registry.register(first)
    registry.register(second)
    registry.unregister(first)
    assert simulator.registered_bytes == second.nbytes
    assert registry.pieces(first) is None
    assert registry.pieces(second) == [slice(0, PIECE), slice(PIECE, 2 * PIECE)]
    registry.unregister(first)  # not registered, nor would it be after a refusal
    registry.register(first)
    registry.close()
    assert simulator.registered_bytes == 0
    assert registry.pieces(second) is None
    registry.close()


# Law 2: a refusal at any piece leaves nothing of the arena registered, and copies exact.

NUM_PIECES = 6


@pytest.mark.parametrize("refused", range(1, NUM_PIECES + 1))
def test_a_refusal_at_any_piece_leaves_nothing_registered(refused: int) -> None:
    simulator = Simulator(fails_at_registration=1 + refused)
    registry = Registry(simulator, PIECE)
    before, arena = arena_of(PIECE), arena_of(NUM_PIECES * PIECE - 9)
    registry.register(before)
    with pytest.raises(PinningFailed, match="the simulator was told to refuse"):
        registry.register(arena)
    assert spans(simulator) == [(before.data_ptr(), before.data_ptr() + PIECE)]
    assert registry.pieces(arena) is None
    assert registry.pieces(before) == [slice(0, PIECE)]
    registry.register(arena)  # the system may have changed its mind
    assert simulator.registered_bytes == before.nbytes + arena.nbytes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("refused", range(1, NUM_PIECES + 1))
def test_copies_of_a_refused_arena_are_exact(refused: int, policy: Policy) -> None:
    simulator = Simulator(policy=policy, fails_at_registration=refused)
    device = Accelerator(simulator, piece_bytes=PIECE, ring_buffer_bytes=BUFFER)
    arena, back = arena_of(NUM_PIECES * PIECE - 9), arena_of(NUM_PIECES * PIECE - 9, seed=1)
    with lane(simulator):
        with pytest.warns(UserWarning, match="cannot be pinned"):
            device.pin("weights", arena)
        device.pin("gradients", back)
        there = device.allocate(arena.nbytes, "weight slots")
        device.copy(there, arena)
        device.copy(back, there)
        simulator.synchronize()
    assert torch.equal(back, arena)
    assert simulator.races == []
    assert simulator.registered_bytes == back.nbytes


def test_a_refusal_that_forgets_pieces_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Simulator(fails_at_registration=3)
    monkeypatch.setattr(simulator, "unregister", lambda address: None)
    with pytest.raises(PinningFailed):
        Registry(simulator, PIECE).register(arena_of(NUM_PIECES * PIECE))
    assert simulator.registered_bytes > 0


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
    registry.register(arena)
    assert registry.pieces(arena[start:stop]) == [slice(*cut) for cut in cuts]


def test_unknown_memory_has_no_pieces() -> None:
    registry, memory = Registry(Simulator(), PIECE), arena_of(8 * PIECE)
    assert registry.pieces(memory) is None
    registry.register(memory[2 * PIECE : 4 * PIECE])
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
    inbound, outbound = Ring(simulator, BUFFER), Ring(simulator, BUFFER)
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
        ring, source = Ring(simulator, BUFFER), arena_of(num_buffers * BUFFER)
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


def test_a_ring_is_as_large_as_it_says() -> None:
    assert Ring(Simulator(), BUFFER).num_bytes == RING_BUFFERS * BUFFER


# What is told.


def test_what_could_not_be_pinned_is_told_in_one_line() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tell("weights", torch.empty(3 << 20), PinningFailed("code 2"), 192 << 20)
    (warning,) = told
    assert str(warning.message) == (
        "host memory: 12.0 MiB of weights cannot be pinned (code 2); its copies use "
        "192.0 MiB of pinned buffers, with one more pass over host memory each. "
        "Raise `ulimit -l` (memlock) to avoid it."
    )


def test_it_is_told_once_whatever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Simulator()

    def refuse(address: int, num_bytes: int) -> None:
        raise PinningFailed("no memlock")

    monkeypatch.setattr(simulator, "register", refuse)
    device = Accelerator(simulator, ring_buffer_bytes=BUFFER)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for name in ("weights", "gradients", "tape"):
            device.pin(name, arena_of(PIECE))
        device.map_host(PIECE, "tape")
    (warning,) = told
    assert str(warning.message).startswith("host memory: 0.0 MiB of weights cannot be pinned (")


def test_the_sizes_are_those_that_pay() -> None:
    """A piece is many huge pages; a ring is little memory beside an arena."""
    assert pinning.PIECE_BYTES % (2 << 20) == 0
    assert 2 * RING_BUFFERS * pinning.RING_BUFFER_BYTES < 1 << 30
