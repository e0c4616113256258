"""Laws of engine/compute/fused.py, with a stand-in that changes what the package changes.

`python -m proofs.liger` has the package itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.device import CpuDevice
from megatrain.engine.compute.fused import require_liger, use_liger
from megatrain.errors import ConfigError, MissingPackage
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched
from testkit.worlds import Case, World, make_batch, world_of

SORT = "llama of 2 layers"
NAMES = ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb")
"""What Liger replaces in transformers' module of the family, for the process."""


class Package:
    """The stand-in: what it was asked for, and which of its functions have run."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.rotated = 0
        self._own_rotation = modeling_llama.apply_rotary_pos_emb

    def rotate(self, *given: Any) -> Any:
        self.rotated += 1
        return self._own_rotation(*given)

    def apply(self, model: PreTrainedModel, **wanted: Any) -> None:
        self.asked.append(wanted)
        if model.config.model_type != "llama":
            return

        def liger_rotary_pos_emb(*given: Any) -> Any:
            return self.rotate(*given)

        for name, value in zip(NAMES, (_Norm, nn.Identity, liger_rotary_pos_emb), strict=True):
            setattr(modeling_llama, name, value)
        for module in model.modules():
            if isinstance(module, LlamaRMSNorm):
                vars(module)["forward"] = MethodType(_Norm.forward, module)


class _Norm(nn.Module):
    """A norm like the model's own, in one op of torch."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """Install the stand-in, on devices that Triton compiles for."""
    made = Package()
    top, inner = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    top.__spec__ = ModuleSpec("liger_kernel", None)
    inner._apply_liger_kernel_to_instance = made.apply  # type: ignore[attr-defined]
    for name, module in (("liger_kernel", top), ("liger_kernel.transformers", inner)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Simulator, "has_triton", True)
    before = {name: getattr(modeling_llama, name) for name in NAMES}
    yield made
    assert {name: getattr(modeling_llama, name) for name in NAMES} == before


def test_a_missing_package_and_a_device_without_triton_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for device in (CpuDevice(), AcceleratorDevice(Simulator(), "simulated")):
        match = rf"its kernels do not run on {device.name}\. Set train\.kernels"
        with pytest.raises(ConfigError, match=match):
            require_liger(device)
    monkeypatch.setattr(Simulator, "has_triton", True)
    with pytest.raises(MissingPackage, match=r"liger, but the package liger-kernel cannot be im"):
        require_liger(AcceleratorDevice(Simulator()))


def test_a_step_uses_them_and_the_host_keeps_its_own(package: Package) -> None:
    world = world_of(SORT)
    case = Case(sort=SORT, steps=(), update="none")
    batch = make_batch(((1, 6),), seed=0)
    with world.engine(case) as engine:
        expected = engine.step(batch).loss
    assert package.rotated == 0
    found = _loss_on_a_device(world, case, batch, "liger")
    assert found == pytest.approx(expected, rel=1e-2)
    assert package.rotated == 2 * 2, "two layers, forward and recompute"
    assert not any("forward" in vars(module) for module in world.decoder.model.modules())


def test_a_model_beside_it_rotates_by_its_own_function(package: Package) -> None:
    world, case = world_of(SORT), Case(sort=SORT, steps=(), update="none")
    batch = make_batch(((1, 6),), seed=0)
    eager = _loss_on_a_device(world, case, batch, "none")
    _loss_on_a_device(world, case, batch, "liger")
    num_rotated = package.rotated
    assert _loss_on_a_device(world, case, batch, "none") == eager
    assert package.rotated == num_rotated


def _loss_on_a_device(world: World, case: Case, batch: Any, kernels: str) -> float | None:
    simulator = Simulator(policy="early")
    with (
        watched(simulator),
        world.engine(case, device=AcceleratorDevice(simulator), kernels=kernels) as engine,
    ):
        return engine.step(batch).loss


@pytest.mark.parametrize(
    ("activation", "fits"), [("silu", ["swiglu"]), ("gelu_pytorch_tanh", ["geglu"]), ("relu", [])]
)
def test_kernels_of_other_activations_and_of_the_loss_are_left_out(
    package: Package, activation: str, fits: list[str]
) -> None:
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, hidden_act=activation,
    )  # fmt: skip
    with torch.device("meta"):
        model = modeling_llama.LlamaForCausalLM(config)
    use_liger(model, AcceleratorDevice(Simulator()))
    assert package.asked == [
        {
            "cross_entropy": False,
            "fused_linear_cross_entropy": False,
            "swiglu": "swiglu" in fits,
            "geglu": "geglu" in fits,
        }
    ]


def test_experts_keep_their_own_kernels(package: Package) -> None:
    model = world_of("mixtral").decoder.model
    with pytest.raises(ConfigError, match="has no kernels for mixtral"):
        use_liger(model, AcceleratorDevice(Simulator()))
    assert package.asked[0]["swiglu"] is False


@pytest.mark.usefixtures("package")
def test_a_family_without_kernels_is_refused() -> None:
    model = world_of("gpt2, tied, with dropout").decoder.model
    with pytest.raises(ConfigError, match=r"liger, which has no kernels for gpt2\. Set"):
        use_liger(model, AcceleratorDevice(Simulator()))
