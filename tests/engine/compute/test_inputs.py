"""Laws of inputs.py: what compute reads of a batch arrives whole, in one copy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.batch import MicroBatch
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.device import CpuDevice, Device
from megatrain.engine.compute.front_and_tail import Edges
from megatrain.engine.compute.inputs import Inputs, MicroInputs
from megatrain.models.template import Template
from megatrain.step.settings import StepSettings
from testkit.simulated.accelerator import Simulator
from testkit.worlds import make_batch, world_of

WORLD = "llama of 2 layers"
SHAPES = ((2, 8), (1, 5))


def inputs_on(device: Device) -> Inputs:
    decoder = world_of(WORLD).decoder
    template = Template(decoder)
    placed = template.placed(device.place) if device.own_memory else template
    return Inputs(device, decoder, Edges(template, placed), StepSettings(chunk_tokens=3))


@pytest.fixture
def simulator() -> Simulator:
    return Simulator(policy="late")


def with_loss_tensors(batch: list[MicroBatch]) -> list[MicroBatch]:
    extra = {"pairs": torch.arange(3, dtype=torch.int32), "scale": torch.tensor([0.5])}
    return [one.with_loss_tensors(**extra) for one in batch]


def tensors_of(one: MicroInputs) -> dict[str, Tensor]:
    """Return all that compute reads."""
    named = {**one.model, **one.loss.loss_tensors, "targets": one.loss.targets}
    named |= {f"chunk {number}": chunk for number, chunk in enumerate(one.trained.chunks)}
    if one.documents is not None:
        named["bounds"] = one.documents.bounds
    others = {"rows": one.rows, "last": one.last_tokens, "flat targets": one.trained.targets}
    return named | {name: tensor for name, tensor in others.items() if tensor is not None}


@pytest.mark.parametrize("form", ["plain", "padded", "flat"])
def test_all_arrives_as_it_was_whatever_went_before(form: str, simulator: Simulator) -> None:
    there, here = inputs_on(AcceleratorDevice(simulator)), inputs_on(CpuDevice())
    for seed, shapes in enumerate([SHAPES, ((1, 3),), ((3, 9), (2, 8))]):
        batch = with_loss_tensors(make_batch(shapes, seed=seed, form=form))  # type: ignore[arg-type]
        rows = [torch.arange(one.input_ids.numel()) for one in batch]
        sent = there.laid_out(batch, rows.__getitem__, predicts=True)
        expected = here.laid_out(batch, rows.__getitem__, predicts=True)
        with simulator.stream():
            assert sent.send() > 0
        simulator.synchronize()
        for one, other in zip(sent.micros, expected.micros, strict=True):
            found, known = tensors_of(one), tensors_of(other)
            assert found.keys() == known.keys()
            for name, tensor in found.items():
                assert simulator.is_device(tensor), name
                assert torch.equal(tensor, known[name]), name
            assert (one.documents is None) == (form != "flat")


def test_without_the_copy_nothing_arrives(simulator: Simulator) -> None:
    sent = inputs_on(AcceleratorDevice(simulator)).laid_out(make_batch(SHAPES, seed=1))
    simulator.synchronize()
    expected = inputs_on(CpuDevice()).laid_out(make_batch(SHAPES, seed=1))
    pairs = zip(sent.micros, expected.micros, strict=True)
    assert not any(torch.equal(a.loss.targets, b.loss.targets) for a, b in pairs)


def test_a_step_sends_once_and_in_one_copy(
    simulator: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies, copy = list[int](), AcceleratorDevice.copy

    def noting(device: AcceleratorDevice, target: Tensor, source: Tensor) -> None:
        copies.append(target.nbytes)
        copy(device, target, source)

    monkeypatch.setattr(AcceleratorDevice, "copy", noting)
    sent = inputs_on(AcceleratorDevice(simulator)).laid_out(make_batch(SHAPES, seed=1))
    assert copies == []
    with simulator.stream():
        assert [sent.send(), sent.send()] == [copies[0], 0]
    assert len(copies) == 1


def test_room_grows_only_for_a_batch_that_needs_more(simulator: Simulator) -> None:
    inputs = inputs_on(AcceleratorDevice(simulator))
    made = []
    for shapes in (((2, 8),), ((1, 8),), ((2, 8),), ((3, 9),)):
        inputs.laid_out(make_batch(shapes, seed=1))
        made.append((simulator.num_allocations, simulator.registered_bytes))
    assert made[0] == made[1] == made[2] != made[3]


def test_memory_that_is_shared_is_used_as_it_is() -> None:
    batch = make_batch(SHAPES, seed=1, form="padded")
    sent = inputs_on(CpuDevice()).laid_out(batch)
    assert sent.send() == 0
    assert sent.micros[0].model["input_ids"] is batch[0].input_ids
    assert sent.micros[0].answers is None
