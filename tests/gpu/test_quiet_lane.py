"""The host is out of the way: what lane compute does on the host does not grow with tokens."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.engine.compute.front_and_tail import Edges
from megatrain.lanes.lane import Action, Lane
from megatrain.step.ops import Op
from testkit.families import tiny_config
from testkit.patience import eventually
from testkit.worlds import Case, Form, Sort, World, make_batch
from tests.gpu.rigs import Rig, SimulatedRig

SHORT, LONG = 32, 128
CASE = Case(sort="", steps=(), update="none")


@functools.cache
def world_of(family: str) -> World:
    return World(Sort(config=lambda: tiny_config(family)))


class HostElements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the elements in host memory that ops read or write."""

    def __init__(self, is_device: Callable[[Tensor], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_device, self.count = is_device, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor) and not value.is_meta and not self._is_device(value):
                self.count += value.numel()
        return result


@contextmanager
def lane_watched(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostElements]:
    """Count what lane compute does on the host, and let it ask the host nothing."""
    elements, act, ask = HostElements(rig.runtime.is_device), Lane.act, Edges._ask_host

    def watched(lane: Lane, op: Op, action: Action) -> int:
        if lane.name != "compute":
            return act(lane, op, action)
        with elements:
            return act(lane, op, action)

    def asks(edges: Edges, run: Callable[[], object]) -> Any:
        assert threading.current_thread().name != "lane compute", "lane compute asks the host"
        return ask(edges, run)

    with monkeypatch.context() as patched:
        patched.setattr(Lane, "act", watched)
        patched.setattr(Edges, "_ask_host", asks)
        yield elements


def host_elements(
    rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    form: Form,
    length: int,
    *,
    may_wait: bool = False,
) -> int:
    """Return the elements that lane compute touches on the host in a steady step."""
    world, shapes = world_of(family), ((1, length), (2, length // 2))
    with rig.running(world.store, seed=1) as accelerator:
        engine = world.engine(CASE, device=accelerator)
        with engine:
            engine.step(make_batch(shapes, seed=1, form=form))
            waits = nullcontext() if may_wait else rig.without_waits()
            with lane_watched(rig, monkeypatch) as elements, waits:
                engine.step(make_batch(shapes, seed=2, form=form))
    return elements.count


@pytest.mark.merge
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", "flat"),
        ("gemma2", "flat"),
        pytest.param("llama", "padded", marks=pytest.mark.thorough),
        pytest.param("gemma2", "padded", marks=pytest.mark.thorough),
        ("gpt2", "padded"),
        pytest.param("bloom", "padded", marks=pytest.mark.thorough),
    ],
)
def test_the_compute_lane_touches_as_much_host_memory_with_any_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch, family: str, form: Form
) -> None:
    rig = SimulatedRig()
    short = host_elements(rig, monkeypatch, family, form, SHORT)
    assert host_elements(rig, monkeypatch, family, form, LONG) == short
    assert short < LONG, "the losses, and what is a number"


# Copies: they are queued, and the caller goes on.


def still_busy(rig: Rig, copy: Callable[[], object]) -> bool:
    """Return whether a stream that was busy before a copy is busy when the copy returns."""
    stream = rig.runtime.stream()
    with stream:
        rig.spin(200_000_000)
        spun = stream.record_event()
        copy()
        busy = not spun.query()
    assert eventually(spun.query)
    return busy


def test_copies_return_while_the_stream_is_busy(rig: Rig) -> None:
    """No mode of torch tells of a copy that waits because its host memory is not pinned."""
    if isinstance(rig, SimulatedRig):
        pytest.skip("a stream of the simulator has done its work whenever it is asked")
    accelerator = rig.bare()
    try:
        host, there = accelerator.map_host(1 << 16, "test"), accelerator.allocate(1 << 16, "test")
        small = accelerator.pinned(torch.arange(9))
        accelerator.synchronize()
        assert still_busy(rig, lambda: accelerator.copy(there, host))
        assert still_busy(rig, lambda: accelerator.copy(host, there))
        assert still_busy(rig, lambda: accelerator.to_device(small))
        assert still_busy(rig, lambda: accelerator.to_host(there))
        pageable = torch.zeros(1 << 16, dtype=torch.uint8)
        assert not still_busy(rig, lambda: there.copy_(pageable, non_blocking=True)), (
            "or a wait would not be noticed"
        )
    finally:
        accelerator.close()
