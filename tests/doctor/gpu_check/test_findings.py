"""Results of a check: an error says whether the device may be lost, and nothing personal leaves."""

from __future__ import annotations

import platform

import pytest
import torch

from megatrain.doctor.gpu_check import findings as module
from megatrain.doctor.gpu_check.findings import Broken, anonymous, failed_check
from megatrain.errors import LaneTimeout, NonFiniteStep, OutOfDeviceMemory


@pytest.mark.parametrize(
    ("error", "may_have_lost_device"),
    [
        (Broken("x"), False),
        (OutOfDeviceMemory("x"), False),
        (torch.OutOfMemoryError("x"), False),
        (NonFiniteStep("x"), False),
        (RuntimeError("called a synchronizing CUDA operation"), False),
        (RuntimeError("cumsum does not have a deterministic implementation"), False),
        (LaneTimeout("x"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
    ],
)
def test_an_error_says_whether_the_device_may_be_lost(
    error: Exception, may_have_lost_device: bool
) -> None:
    assert failed_check("lanes", error).may_have_lost_device == may_have_lost_device


def test_nothing_personal_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_user", lambda: "ada")
    monkeypatch.setattr(platform, "node", lambda: "analytical-engine")
    text = "ada at analytical-engine: /home/ada/runs/x.py, line 3; 12.5 GB/s in/out, a/b, adamw"
    assert anonymous(text) == "(user) at (host): (path), line 3; 12.5 GB/s in/out, a/b, adamw"
