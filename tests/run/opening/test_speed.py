"""What a user is told of the layers' speed on a device."""

from __future__ import annotations

import pytest

from megatrain.config import Config
from megatrain.devices.accelerator import Accelerator
from megatrain.devices.device import CpuDevice
from megatrain.errors import MissingPackage
from megatrain.run.opening.speed import require_kernels, speed_notes
from testkit.simulated.accelerator import Simulator
from testkit.worlds import world_of


def test_waits_of_experts_and_the_choice_to_compile_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(model="m", data="rows.jsonl", train={"compile": "auto"})
    device, experts = Accelerator(Simulator()), world_of("mixtral").decoder
    monkeypatch.setattr(Simulator, "groups", lambda simulator, dtype: False)
    first, second = speed_notes(config, experts, device)
    assert first.startswith("compile: auto is off: packed documents are attended to alone")
    assert second.startswith("experts: torch has no kernel for their products on accelerator, so")
    assert len(speed_notes(config, world_of("llama of 2 layers").decoder, device)) == 1
    config = Config(model="m", data="rows.jsonl")
    assert speed_notes(config, experts, CpuDevice()) == []


def test_kernels_that_are_not_here_end_a_run_before_its_data_is_read() -> None:
    device = Accelerator(Simulator())
    require_kernels(Config(model="m", data="rows.jsonl"), device)
    with pytest.raises(MissingPackage, match="liger-kernel"):
        require_kernels(Config(model="m", data="rows.jsonl", train={"kernels": "liger"}), device)
