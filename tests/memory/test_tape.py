"""Laws of tape.py: what is taken is what was kept; the ring bounds what is on the device."""

from __future__ import annotations

import gc
from itertools import product

import pytest
import torch
from torch import Tensor

from megatrain.memory.tape import Tape
from megatrain.pipeline.device import CpuDevice

KEYS = list(product((1, 2, 3), (0, 1)))


def inputs(seed: int) -> dict[tuple[int, int], Tensor]:
    """Unequal by micro-batch; the second is transposed."""
    torch.manual_seed(seed)
    return {
        (layer, micro): torch.randn(2, 3, 4).bfloat16()
        if micro == 0
        else torch.randn(1, 4, 5).bfloat16().transpose(1, 2)
        for layer, micro in KEYS
    }


def through_the_device(tape: Tape, kept: dict[tuple[int, int], Tensor]) -> list[Tensor]:
    for key, hidden in kept.items():
        tape.keep(key, None, hidden)
    return [tape.take(key, None) for key in reversed(KEYS)]


def through_the_host(tape: Tape, kept: dict[tuple[int, int], Tensor]) -> list[Tensor]:
    """One ring slot after the other, as the reference plays it."""
    for turn, key in enumerate(KEYS):
        tape.keep(key, turn % 2, kept[key])
        assert tape.stash(key, turn % 2) == kept[key].nbytes
    taken = []
    for turn, key in enumerate(reversed(KEYS)):
        assert tape.restore(key, turn % 2) == kept[key].nbytes
        taken.append(tape.take(key, turn % 2))
    return taken


@pytest.mark.parametrize("copying", [True, False])
@pytest.mark.parametrize("way", [through_the_device, through_the_host])
def test_what_is_taken_is_what_was_kept(way, copying: bool) -> None:  # type: ignore[no-untyped-def]
    tape = Tape(CpuDevice(copying=copying))
    for step in range(3):
        kept = inputs(step)
        originals = {key: hidden.clone() for key, hidden in kept.items()}
        for key, found in zip(reversed(KEYS), way(tape, kept), strict=True):
            assert torch.equal(found, originals[key])
            assert found.stride() == kept[key].stride()


def test_a_mover_that_mixes_up_bytes_would_be_noticed() -> None:
    class Wrong(CpuDevice):
        def to_device(self, source: Tensor) -> Tensor:
            return super().to_device(source).flip(0)

    kept = inputs(0)
    taken = through_the_host(Tape(Wrong(copying=True)), kept)
    assert any(not torch.equal(t, kept[k]) for k, t in zip(reversed(KEYS), taken, strict=True))


def test_on_the_host_no_more_inputs_are_on_the_device_than_the_ring_holds() -> None:
    device = CpuDevice(copying=True)
    tape = Tape(device)
    size = 2 * 3 * 4 * 2
    for turn, key in enumerate(KEYS):
        tape.keep(key, turn % 2, device.keep(torch.zeros(2, 3, 4).bfloat16(), "hidden states"))
        assert device.meter.live_bytes <= 2 * size
        tape.stash(key, turn % 2)
    assert device.meter.live_bytes == 0
    for turn, key in enumerate(reversed(KEYS)):
        tape.restore(key, turn % 2)
        if turn % 2:
            assert device.meter.live_bytes == 2 * size
            tape.take(KEYS[-turn], 0)
            tape.take(key, 1)
    assert device.meter.live_bytes == 0
    assert device.meter.peak_bytes == 2 * size


def test_host_buffers_serve_every_step() -> None:
    made: list[Tensor | None] = []

    class Counting(CpuDevice):
        def to_host(self, source: Tensor, buffer: Tensor | None) -> Tensor:
            made.append(buffer)
            return super().to_host(source, buffer)

    tape = Tape(Counting(copying=True))
    for step in range(3):
        through_the_host(tape, inputs(step))
    assert [buffer is None for buffer in made] == [True] * 6 + [False] * 12


def test_unified_memory_keeps_no_input_beyond_its_use() -> None:
    device = CpuDevice(copying=False)
    tape = Tape(device)
    kept = {key: device.keep(hidden, "hidden states") for key, hidden in inputs(0).items()}
    through_the_host(tape, kept)
    del kept
    assert device.meter.live_bytes == 0


def test_what_a_failed_step_left_is_forgotten() -> None:
    device = CpuDevice(copying=True)
    tape = Tape(device)
    tape.keep((1, 0), None, device.keep(torch.zeros(4), "hidden states"))
    tape.keep((2, 0), 0, device.keep(torch.zeros(4), "hidden states"))
    tape.stash((2, 0), 0)
    tape.keep((3, 0), 1, device.keep(torch.zeros(4), "hidden states"))
    tape.clear()
    gc.collect()
    assert device.meter.live_bytes == 0
    with pytest.raises(KeyError):
        tape.restore((2, 0), 0)
    kept = inputs(1)
    for key, found in zip(reversed(KEYS), through_the_host(tape, kept), strict=True):
        assert torch.equal(found, kept[key])
