"""Laws of Coherent: in one memory nothing is copied, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("testkit.host_gpu", exc_type=ImportError)

from megatrain.devices.accelerator import AcceleratorDevice, Coherent, accelerator, find_device
from megatrain.engine.engine import Engine
from megatrain.errors import ConfigError
from megatrain.memory.kinds import TensorKind
from testkit.host_gpu import control
from testkit.worlds import Case, make_batch, world_of

pytestmark = pytest.mark.hostgpu
STEPS = (((1, 4), (2, 3)), ((1, 5),))


@pytest.fixture(autouse=True)
def _one_memory() -> Iterator[None]:
    with control.integrated():
        yield
    assert control.registered_bytes() == 0


def device() -> Coherent:
    found = accelerator("hostgpu:1")
    assert isinstance(found, Coherent)
    return found


CASES = [
    Case(sort="llama of 2 layers", steps=STEPS, update="late", evaluates_after=(0,)),
    Case(sort="llama in fp32", steps=STEPS, update="late", form="padded"),
    Case(sort="llama of 5 layers", steps=STEPS, update="in_backward", kept_layers=2),
    Case(sort="llama of 5 layers", steps=STEPS, update="second_backward", tape="host"),
    Case(sort="llama of 2 layers", steps=STEPS, update="late", tier="states", form="flat"),
    Case(sort="gemma, tied", steps=STEPS, update="late", form="packed"),
    Case(sort="mixtral", steps=STEPS, update="late", grad_slots=1),
    Case(sort="llama, partly frozen", steps=STEPS, update="late"),
    Case(sort="gemma, tied", steps=STEPS, update="none"),
]


@pytest.mark.merge
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.sort}, {case.update}, {case.form}")
def test_bits_are_those_of_the_copying_device_and_of_one_op_at_a_time(case: Case) -> None:
    world = world_of(case.sort)
    copying = AcceleratorDevice(device()._runtime, "hostgpu:1")
    expected = world.play(case, device=copying, lanes=None)
    for timing in control.TIMINGS:
        with control.timed(timing):
            assert not world.play(case, device=device(), lanes=None).differences(expected)
    one = device()
    found = world.play(case, device=one, lanes=one.lanes(), reference=True)
    assert not found.differences(expected), "one op at a time"
    if case.form not in ("packed", "flat"):  # for documents the device has a kernel of its own
        of_cpu = world.play(replace(case, copying=False))
        assert not of_cpu.differences(expected)


def test_without_one_memory_compute_would_not_see_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sibling: copies in place of aliases are those of the first step."""
    case = CASES[0]
    world = world_of(case.sort)
    expected = world.play(case, device=device(), lanes=None)

    def copied(coherent: Coherent, tensor: Tensor) -> Tensor:
        return coherent.place(tensor)

    monkeypatch.setattr(Coherent, "in_place", copied)
    assert world.play(case, device=device(), lanes=None).differences(expected)


@pytest.mark.merge
def test_streams_of_their_own_would_race_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sibling: memory that compute drops is given out again while the out lane reads it."""
    case = Case(sort="llama of 5 layers", steps=STEPS * 3, update="late")
    world = world_of(case.sort)
    expected = world.play(case, device=device(), lanes=None)
    monkeypatch.setattr(Coherent, "_lane_stream", AcceleratorDevice._lane_stream)
    found: list[str] = []
    for _ in range(5):
        with control.timed("random", link_bytes_per_s=1e6):
            try:
                found += world.play(case, device=device(), lanes=None).differences(expected)
            except torch.AcceleratorError as error:  # what it read was no index
                found.append(str(error))
                break
    control.start_anew()
    assert found


def engine(one: AcceleratorDevice, **changes: Any) -> Engine:
    return world_of("llama of 2 layers").engine(CASES[0], device=one, lanes=None, **changes)


def test_compute_reads_weights_and_adds_up_gradients_at_their_addresses_in_the_store() -> None:
    world = world_of("llama of 2 layers")
    with engine(device()) as made:
        made.step(make_batch(STEPS[0], seed=0))
        of_compute = [
            tensor for params in made._machine.weights._sources[0]._params  # type: ignore[attr-defined]
            for tensor in params.values()
        ]  # fmt: skip
        homes = made._machine.gradients._sums._homes  # type: ignore[union-attr]
        params = world.decoder.params
        assert all(tensor.device.type == "hostgpu" for tensor in (*of_compute, *homes.values()))
        assert {t.data_ptr() for t in of_compute} == {
            world.store.param(param.name, TensorKind.HI).data_ptr() for param in params
        }
        assert {name: t.data_ptr() for name, t in homes.items()} == {
            param.name: world.store.param(param.name, TensorKind.GRAD).data_ptr()
            for param in params
        }


@pytest.mark.parametrize("in_place", [True, False])
def test_a_step_neither_fetches_nor_waits(in_place: bool) -> None:
    one = accelerator("hostgpu:1", in_place=in_place)
    with engine(one, trace=True) as made:
        made.step(make_batch(STEPS[0], seed=0))
        made.synchronize()
        before = control.counters()
        made.step(make_batch(STEPS[0], seed=1))
        made.synchronize()
        after = control.counters()
        assert made.trace is not None
        kinds = {str(span.op.kind) for span in made.trace.spans}
    assert ("fetch" in kinds) is not in_place
    assert after["silent_waits"] == before["silent_waits"]
    assert after["unshaped_ops"] == before["unshaped_ops"]


def test_memory_that_is_not_registered_is_refused_with_the_way_out() -> None:
    control.refuse_registration_at(1)
    text = r"^host memory: weights, .* cannot be registered .* Set memory.slots to 2"
    with pytest.raises(ConfigError, match=text):
        engine(device())


def test_it_is_for_one_process_in_one_memory_that_is_given_no_slots() -> None:
    assert isinstance(find_device("auto"), Coherent)
    assert not isinstance(find_device("hostgpu:1", in_place=False), Coherent)
    assert not isinstance(find_device("hostgpu", local_rank=1), Coherent)
    found = AcceleratorDevice(device()._runtime)
    with pytest.raises(AssertionError, match="copied into slots"):
        found.in_place(torch.zeros(1))


def test_a_tensor_of_no_bytes_is_in_place_too() -> None:
    found = device().in_place(torch.zeros(0, 3))
    assert found.shape == (0, 3)
    assert found.device.type == "hostgpu"
