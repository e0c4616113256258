"""What a user is told of the speed of layers and updates."""

from __future__ import annotations

import pytest

from megatrain.config import Config
from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.device import CpuDevice
from megatrain.errors import ConfigError, MissingPackage
from megatrain.run.opening.opening import require_kernels, speed_notes
from testkit.simulated.accelerator import Simulator
from testkit.worlds import world_of


def test_waits_of_experts_and_the_choice_to_compile_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config.model_validate(
        {"model": "m", "data": "rows.jsonl", "train": {"compile": "auto"}}
        | {"memory": {"tile_tokens": 4096}}
    ).decided(packing=True)
    device, experts = AcceleratorDevice(Simulator()), world_of("mixtral").decoder
    monkeypatch.setattr("megatrain.run.opening.opening.load_kernel", lambda: "a fast one")
    monkeypatch.setattr(Simulator, "groups", lambda simulator, dtype: False)
    first, second, third = speed_notes(config, experts, device)
    assert first.startswith("compile: auto is off: layers run over tiles")
    assert second == "kernels: auto is none: Triton does not compile for this device"
    assert third.startswith("experts: torch has no kernel for their products on accelerator, so")
    assert len(speed_notes(config, world_of("llama of 2 layers").decoder, device)) == 2
    config = Config(model="m", data="rows.jsonl")
    assert speed_notes(config, experts, CpuDevice()) == []


def test_the_choice_of_kernels_is_told_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.run.opening.opening.load_kernel", lambda: "a fast one")
    monkeypatch.setattr(Simulator, "has_triton", True)
    device, llama = AcceleratorDevice(Simulator()), world_of("llama of 2 layers").decoder
    (missing,) = speed_notes(Config(model="m", data="rows.jsonl"), llama, device)
    assert missing.endswith("liger-kernel is not installed (pip install 'megatrain[kernels]')")
    monkeypatch.setattr("megatrain.run.opening.planned.liger_installed", lambda: True)
    (chosen,) = speed_notes(Config(model="m", data="rows.jsonl"), llama, device)
    assert chosen.startswith("kernels: auto is liger: norms, rotary positions and feed-forward")
    assert chosen.endswith("The last bits are not those of train.kernels: none")
    given = Config(model="m", data="rows.jsonl", train={"kernels": "none"})
    assert speed_notes(given, llama, device) == []


def test_the_path_of_linear_attention_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.run.opening.opening.load_kernel", lambda: "a fast one")
    monkeypatch.setattr("megatrain.planning.from_config.LINEAR_ATTENTION_FAMILIES", {"llama"})
    config = Config(model="m", data="rows.jsonl", train={"kernels": "none"})
    hybrid = world_of("llama of 2 layers").decoder
    (note,) = speed_notes(config, hybrid, AcceleratorDevice(Simulator()))
    assert note.startswith("linear attention: torch path, slower: Triton does not compile")
    monkeypatch.setattr(Simulator, "has_triton", True)
    (note,) = speed_notes(config, hybrid, AcceleratorDevice(Simulator()))
    assert note == "linear attention: torch path, slower; pip install 'megatrain[kernels]'"
    assert speed_notes(config, hybrid, CpuDevice()) == []


def test_kernels_that_are_not_here_end_a_run_before_its_data_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = AcceleratorDevice(Simulator())
    require_kernels(Config(model="m", data="rows.jsonl"), device)
    monkeypatch.setattr(Simulator, "has_triton", True)
    with pytest.raises(MissingPackage, match="liger-kernel"):
        require_kernels(Config(model="m", data="rows.jsonl", train={"kernels": "liger"}), device)


def test_fp8_on_a_device_without_it_ends_a_run_before_its_data_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(model="m", data="rows.jsonl", train={"products": "fp8"})
    require_kernels(config, CpuDevice())
    monkeypatch.setattr("megatrain.engine.compute.products.why_not_fp8", lambda device: "sm_80")
    why = r"^train\.products is fp8, which cpu does not multiply \(sm_80\)\. Set "
    with pytest.raises(ConfigError, match=why):
        require_kernels(config, CpuDevice())
