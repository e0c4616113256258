"""The laws of `megatrain doctor --gpu` on a device that torch drives: kept, and able to fail."""

from __future__ import annotations

import pytest
from torch import Tensor

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.doctor.gpu_check.laws import (
    copies_are_exact,
    equals_resident,
    lanes_equal_reference,
    nobody_waits,
    packed_equals_alone,
    tried,
)
from megatrain.doctor.gpu_check.tiny_models import TinyModel
from megatrain.doctor.subject import Subject
from tests.gpu.rigs import RealRig, Rig


def subject_on(rig: Rig) -> Subject:
    if not isinstance(rig, RealRig):
        pytest.skip("tests/doctor/gpu_check has them without a device")
    return Subject(name="rig", place=rig.torch_device, device_bytes=0, runtime=rig.runtime)


@pytest.mark.few(1)
def test_the_laws_hold(rig: Rig) -> None:
    subject = subject_on(rig)
    laws = {
        "copies": lambda: copies_are_exact(subject.new_device(), subject),
        "resident": lambda: equals_resident(subject, TinyModel.make("gemma, tied", "bf16")),
        "packed": lambda: packed_equals_alone(subject, TinyModel.make("packed, windows", "bf16")),
        "lanes": lambda: lanes_equal_reference(subject),
        "waits": lambda: nobody_waits(subject),
    }
    checks = [tried(name, law) for name, law in laws.items()]
    assert [(check.name, check.found) for check in checks if check.state != "ok"] == []


def test_a_wait_of_the_host_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = subject_on(rig)

    def asks(accelerator: AcceleratorDevice, tensor: Tensor, purpose: str) -> Tensor:
        tensor.sum().item()
        return tensor

    monkeypatch.setattr(AcceleratorDevice, "counted", asks)
    check = tried("waits", lambda: nobody_waits(subject))
    assert check.state == "wrong", check.found
    assert "called a synchronizing" in check.found
