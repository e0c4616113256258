"""Other kernels against eager ones: near is right, far is wrong, absent is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.doctor.gpu_check.findings import Check
from megatrain.doctor.gpu_check.long import kernels_agree as module
from megatrain.doctor.gpu_check.long.kernels_agree import OTHERS, OtherKernels, agreement
from megatrain.doctor.subject import CPU
from testkit.simulated.accelerator import Simulator

DEVICE = replace(CPU, name="device", runtime=Simulator())


def found_with(monkeypatch: pytest.MonkeyPatch, change: float, package: str = "torch") -> Check:
    """Compare with kernels that are off by a share of the gradient."""

    def step(subject: Any, kernels: OtherKernels) -> tuple[float, dict[str, torch.Tensor]]:
        off = change if kernels.package else 0.0
        return 2.0, {"weight": torch.full((8,), 1.0 + off)}

    monkeypatch.setattr(module, "_step", step)
    monkeypatch.setitem(OTHERS, "liger", OtherKernels(package=package))
    return agreement(DEVICE, "liger")


def test_near_is_right_and_far_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_with(monkeypatch, 0.01).state == "ok"
    wrong = found_with(monkeypatch, 0.1)
    assert (wrong.state, wrong.causes) == ("wrong", ("kernels",))
    assert "at most 1.0e-01 of a norm (weight), over 0.03" in wrong.found
    assert found_with(monkeypatch, float("nan")).state == "wrong"


def test_what_is_absent_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = found_with(monkeypatch, 0.0, package="no_such_package")
    assert absent.state == "left out"
    assert absent.found == "the package no_such_package is not installed"
    assert agreement(CPU, "compile").found == "a processor has no such kernels"


def test_the_steps_that_are_compared_are_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, gradients = module._step(CPU, OtherKernels(package=""))
    again, same = module._step(CPU, OtherKernels(package="", attn="eager"))
    assert again == pytest.approx(loss, rel=module.TOLERANCE)
    assert max(module._distance(same[name], value) for name, value in gradients.items()) < 0.03
    assert len(gradients) == 30
