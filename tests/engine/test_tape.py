"""Laws of tape.py: what is taken is what was kept; the ring bounds the device; room is reserved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from megatrain.devices.device import CpuDevice
from megatrain.engine.tape import ALIGNMENT, Tape

LAYERS, SHAPES = (1, 2, 3), ((2, 3, 32), (1, 5, 32))
KEYS = list(product(LAYERS, range(len(SHAPES))))
BF16_BYTES = [2 * rows * length * width for rows, length, width in SHAPES]
Key = tuple[int, int]


class CountingDevice(CpuDevice):
    """Notes the room it is asked for, by place, and what host memory it gets back."""

    def __init__(self, *, copying: bool = True) -> None:
        super().__init__(copying=copying)
        self.rooms: list[tuple[str, int]] = []
        self.returned: list[int] = []

    def allocate(self, num_bytes: int, purpose: str) -> Tensor:
        assert purpose == "tape"
        self.rooms.append(("device", num_bytes))
        return super().allocate(num_bytes, purpose).fill_(0xFF)

    def map_host(self, num_bytes: int, purpose: str) -> Tensor:
        assert purpose == "tape"
        self.rooms.append(("host", num_bytes))
        return super().map_host(num_bytes, purpose).fill_(0xFF)

    def unmap_host(self, arena: Tensor) -> None:
        self.returned.append(arena.nbytes)


def inputs(seed: int) -> dict[Key, Tensor]:
    """Unequal by micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    return {(b, m): torch.randn(SHAPES[m], generator=generator).bfloat16() for b, m in KEYS}


def through_the_device(tape: Tape, kept: dict[Key, Tensor]) -> Iterator[tuple[Key, Tensor]]:
    for key, hidden in kept.items():
        tape.keep(key, None, hidden)
    for key in reversed(KEYS):
        yield key, tape.take(key, None)


def through_the_host(tape: Tape, kept: dict[Key, Tensor]) -> Iterator[tuple[Key, Tensor]]:
    """One ring slot after the other, as the reference plays it."""
    for turn, key in enumerate(KEYS):
        tape.keep(key, turn % 2, kept[key])
        tape.stash(key, turn % 2)
    for turn, key in enumerate(reversed(KEYS)):
        tape.restore(key, turn % 2)
        yield key, tape.take(key, turn % 2)


WAYS = {False: through_the_device, True: through_the_host}


def tape_for(device: CpuDevice, *, on_host: bool) -> Tape:
    tape = Tape(device, on_host=on_host, num_ring_slots=2)
    tape.reserve(LAYERS, BF16_BYTES)
    return tape


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


# Law 1: what is taken is what was kept.


@pytest.mark.parametrize("copying", [True, False])
@pytest.mark.parametrize("on_host", [True, False])
def test_what_is_taken_is_what_was_kept(on_host: bool, copying: bool) -> None:
    tape = tape_for(CountingDevice(copying=copying), on_host=on_host)
    for step in range(3):
        kept, originals = inputs(step), inputs(step)
        for key, found in WAYS[on_host](tape, kept):
            assert torch.equal(found, originals[key])


@pytest.mark.parametrize("on_host", [True, False])
def test_a_copy_is_no_longer_the_callers(on_host: bool) -> None:
    """Compute may overwrite what it has handed over."""
    tape = tape_for(CountingDevice(), on_host=on_host)
    hidden = torch.ones(SHAPES[0]).bfloat16()
    tape.keep((1, 0), 0 if on_host else None, hidden)
    hidden.zero_()
    if on_host:
        tape.stash((1, 0), 0)
        tape.restore((1, 0), 1)
    assert (tape.take((1, 0), 1 if on_host else None) == 1).all()


def test_a_device_that_mixes_up_bytes_would_be_noticed() -> None:
    class Wrong(CpuDevice):
        def copy(self, target: Tensor, source: Tensor) -> None:
            super().copy(target, source.roll(1))

    class Forgetful(CpuDevice):
        def copy(self, target: Tensor, source: Tensor) -> None:
            pass

    for device in (Wrong(copying=True), Forgetful(copying=True)):
        tape, kept = tape_for(device, on_host=True), inputs(0)
        taken = [torch.equal(t, kept[key]) for key, t in through_the_host(tape, kept)]
        assert not all(taken)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "as they come": lambda hidden: hidden,
    "transposed": lambda hidden: hidden.transpose(1, 2).contiguous().transpose(1, 2),
    "a slice": lambda hidden: torch.cat([hidden, hidden], 2)[:, :, ::2],
    "expanded": lambda hidden: hidden[:, :1].expand(SHAPES[0]),
    "fp32": lambda hidden: hidden.float()[:, :, :16],
    "not finite": lambda hidden: hidden.clone().fill_(float("inf")),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("on_host", [True, False])
def test_strides_and_dtype_are_kept_where_memory_is_dense(on_host: bool, form: str) -> None:
    tape = tape_for(CountingDevice(), on_host=on_host)
    hidden = FORMS[form](inputs(0)[1, 0])
    slot = 0 if on_host else None
    tape.keep((1, 0), slot, hidden)
    if on_host:
        assert tape.stash((1, 0), 0) == hidden.nbytes
        assert tape.restore((1, 0), 0) == hidden.nbytes
    found = tape.take((1, 0), slot)
    assert torch.equal(found, hidden)
    assert (found.dtype, found.stride()) == (hidden.dtype, torch.empty_like(hidden).stride())


def test_what_was_taken_stays_valid_for_autograd_while_the_ring_is_filled() -> None:
    tape, kept = tape_for(CountingDevice(), on_host=True), inputs(0)
    for turn, key in enumerate(KEYS[:2]):
        tape.keep(key, turn, kept[key])
        tape.stash(key, turn)
    tape.restore(KEYS[1], 1)
    leaf = tape.take(KEYS[1], 1).detach().requires_grad_()
    squares = (leaf * leaf).sum()
    tape.restore(KEYS[0], 0)
    tape.keep((2, 0), 0, kept[2, 0])
    (gradient,) = torch.autograd.grad(squares, leaf)
    assert torch.equal(gradient, 2 * kept[KEYS[1]])


# Law 2: the ring bounds what is on the device.


@pytest.mark.parametrize("num_layers", [3, 30])
def test_on_the_host_the_device_has_room_for_the_ring_alone(num_layers: int) -> None:
    device = CountingDevice()
    tape = Tape(device, on_host=True, num_ring_slots=2)
    tape.reserve(range(1, num_layers + 1), BF16_BYTES)
    assert device.meter.live_bytes == 2 * padded(max(BF16_BYTES))
    for _ in through_the_host(tape, inputs(0)):
        pass
    assert device.meter.peak_bytes == 2 * padded(max(BF16_BYTES))
    host = num_layers * sum(map(padded, BF16_BYTES))
    assert sorted(device.rooms) == [("device", device.meter.peak_bytes), ("host", host)]


def test_a_tape_on_the_device_has_room_for_every_input() -> None:
    device = CountingDevice()
    tape_for(device, on_host=False)
    assert device.rooms == [("device", 3 * sum(map(padded, BF16_BYTES)))]


def test_more_than_was_reserved_is_refused() -> None:
    tape = tape_for(CountingDevice(), on_host=False)
    with pytest.raises(AssertionError, match="448 bytes in room for 384"):
        tape.keep((1, 0), None, torch.zeros(1, 7, 32).bfloat16())


# Law 3: room is allocated by `reserve` alone, and only if a step needs more.


@pytest.mark.parametrize("on_host", [True, False])
def test_room_serves_every_step_that_needs_no_more(on_host: bool) -> None:
    device = CountingDevice()
    tape = tape_for(device, on_host=on_host)
    rooms = list(device.rooms)
    for step, sizes in enumerate((BF16_BYTES, BF16_BYTES[::-1], BF16_BYTES[:1], BF16_BYTES)):
        tape.reserve(LAYERS, sizes)
        if sizes == BF16_BYTES:
            kept = inputs(step)
            assert all(torch.equal(t, kept[key]) for key, t in WAYS[on_host](tape, kept))
    assert device.rooms == rooms
    assert device.returned == []


@pytest.mark.parametrize("on_host", [True, False])
def test_a_larger_step_gets_more_room_and_the_old_is_let_go_first(on_host: bool) -> None:
    device = CountingDevice()
    tape = Tape(device, on_host=on_host, num_ring_slots=2)
    tape.reserve(LAYERS, [size // 4 for size in BF16_BYTES])
    small = dict(device.rooms)
    tape.reserve(LAYERS, BF16_BYTES)
    large = dict(device.rooms)
    assert all(large[place] > size for place, size in small.items())
    assert device.meter.live_bytes == device.meter.peak_bytes == large["device"]
    assert device.returned == ([small["host"]] if on_host else [])
    kept = inputs(0)
    assert all(torch.equal(t, kept[key]) for key, t in WAYS[on_host](tape, kept))


def test_room_on_the_host_grows_by_a_quarter_or_is_announced() -> None:
    device = CountingDevice()
    tape = tape_for(device, on_host=True)
    first = dict(device.rooms)["host"]
    assert first == len(LAYERS) * sum(map(padded, BF16_BYTES)), "the first step has what it needs"
    tape.reserve(LAYERS, [*BF16_BYTES, 256])
    assert dict(device.rooms)["host"] == int(1.25 * first)
    announced = CountingDevice()
    tape = Tape(announced, on_host=True, num_ring_slots=2)
    tape.announce(10 * first)
    for sizes in (BF16_BYTES, BF16_BYTES * 3, BF16_BYTES * 8):
        tape.reserve(LAYERS, sizes)
        assert dict(announced.rooms)["host"] == 10 * first
    assert announced.returned == []


@pytest.mark.parametrize("on_host", [True, False])
def test_places_are_aligned_and_apart(on_host: bool) -> None:
    device = CountingDevice()
    tape = tape_for(device, on_host=on_host)
    for turn, key in enumerate(KEYS[:2]):
        tape.keep(key, turn if on_host else None, inputs(0)[key])
    first, second = (tape.take(key, turn if on_host else None) for turn, key in enumerate(KEYS[:2]))
    assert (second.data_ptr() - first.data_ptr()) % ALIGNMENT == 0
    assert second.data_ptr() >= first.data_ptr() + first.nbytes


# Where compute shares the host's memory.


@pytest.mark.parametrize("on_host", [True, False])
def test_unified_memory_copies_nothing_and_keeps_no_input_beyond_its_use(on_host: bool) -> None:
    device = CountingDevice(copying=False)
    tape = tape_for(device, on_host=on_host)
    kept = {key: device.counted(hidden, "hidden states") for key, hidden in inputs(0).items()}
    assert all(found is kept[key] for key, found in WAYS[on_host](tape, kept))
    assert (tape.stash((1, 0), 0), tape.restore((1, 0), 0)) == (0, 0)
    assert device.rooms == []
    del kept
    assert device.meter.live_bytes == 0


@pytest.mark.parametrize("copying", [True, False])
def test_what_a_failed_step_left_is_forgotten(copying: bool) -> None:
    device = CountingDevice(copying=copying)
    tape = tape_for(device, on_host=True)
    at_rest, hidden = device.meter.live_bytes, inputs(0)[1, 0]
    tape.keep((1, 0), 0, device.counted(hidden.clone(), "hidden states"))
    tape.stash((1, 0), 0)
    tape.keep((2, 0), 1, device.counted(hidden.clone(), "hidden states"))
    tape.clear()
    assert device.meter.live_bytes == at_rest
    with pytest.raises(KeyError):
        tape.take((2, 0), 1)
    kept = inputs(1)
    assert all(torch.equal(t, kept[key]) for key, t in through_the_host(tape, kept))
