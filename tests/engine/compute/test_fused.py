"""Laws of engine/compute/fused.py, with a stand-in for the package."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megatrain.devices.accelerator import Accelerator
from megatrain.devices.device import CpuDevice
from megatrain.engine.compute.fused import require_liger, use_liger
from megatrain.errors import ConfigError, MissingPackage
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched
from testkit.worlds import Case, make_batch, world_of

SORT = "llama of 2 layers"


def _norm(module: Any, hidden: Tensor) -> Tensor:
    """A norm like the model's own, in one op of torch."""
    return torch.nn.functional.rms_norm(
        hidden, module.weight.shape, module.weight, module.variance_epsilon
    )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Install a package that replaces norms of llama, and return what it was asked for."""
    asked: list[dict[str, Any]] = []

    def apply(model: PreTrainedModel, **wanted: Any) -> None:
        asked.append(wanted)
        for module in model.modules():
            if isinstance(module, LlamaRMSNorm):
                vars(module)["forward"] = MethodType(_norm, module)

    package, inner = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    package.__spec__ = ModuleSpec("liger_kernel", None)
    inner._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", inner)
    return asked


def test_a_missing_package_and_a_processor_are_refused_by_name() -> None:
    with pytest.raises(MissingPackage, match=r"liger, but the package liger-kernel is not inst"):
        require_liger(Accelerator(Simulator()))
    with pytest.raises(ConfigError, match=r"its kernels do not run on cpu\. Set train\.kernels"):
        require_liger(CpuDevice())


def test_a_step_uses_them_and_the_host_keeps_its_own(asked: list[dict[str, Any]]) -> None:
    world = world_of(SORT)
    case = Case(sort=SORT, steps=(), update="none")
    batch = make_batch(((1, 6),), seed=0)
    with world.engine(case) as engine:
        expected = engine.step(batch).loss
    simulator = Simulator(policy="early")
    with watched(simulator):
        device = Accelerator(simulator)
        with world.engine(case, device=device, kernels="liger") as engine:
            found = engine.step(batch).loss
    assert asked == [{"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}]
    assert found == pytest.approx(expected, rel=1e-2)
    assert not any("forward" in vars(module) for module in world.decoder.model.modules())


@pytest.mark.usefixtures("asked")
def test_a_family_without_kernels_is_refused() -> None:
    model = world_of("gpt2, tied, with dropout").decoder.model
    with pytest.raises(ConfigError, match=r"liger, which has no kernels for gpt2\. Set"):
        use_liger(model, Accelerator(Simulator()))
