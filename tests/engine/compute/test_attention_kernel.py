"""Law of attention_kernel.py: forward and recompute of a step have the same switches."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PreTrainedConfig

from megatrain.devices.accelerator import AcceleratorDevice
from megatrain.devices.device import CpuDevice
from megatrain.engine.compute.attention_kernel import kernel_switches
from megatrain.engine.compute.layers import Layers
from testkit.simulated.accelerator import Simulator
from testkit.simulated.watched import watched
from testkit.worlds import Case, make_batch, world_of

ALL = ("flash", "mem_efficient", "math", "cudnn")


def switches() -> tuple[str, ...]:
    """Return the kernels that another thread may use."""
    found: list[str] = []

    def look() -> None:
        backends: Any = torch.backends.cuda
        found.extend(name for name in ALL if getattr(backends, f"{name}_sdp_enabled")())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return tuple(found)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(), ALL[:3]),
        (LlamaConfig(head_dim=256), ALL[:3]),
        (LlamaConfig(attention_dropout=0.1), ALL[:3]),
        (LlamaConfig(attention_dropout=0.1, head_dim=256), ALL[1:3]),
        (GPT2Config(attn_pdrop=0.1), ALL[:3]),
        (GPT2Config(attn_pdrop=0.0), ALL[:3]),
    ],
)
def test_kernels_with_plans_are_off_and_those_that_would_draw_other_masks(
    config: PreTrainedConfig, expected: tuple[str, ...]
) -> None:
    decoder: Any = SimpleNamespace(text_config=config)
    with kernel_switches(decoder, AcceleratorDevice(Simulator()))():
        assert switches() == expected
    assert switches() == ALL
    with kernel_switches(decoder, CpuDevice())():
        assert switches() == ALL


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_forward_and_recompute_of_a_step_have_them(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of("llama of 2 layers")
    monkeypatch.setattr(world.decoder.config, "attention_dropout", dropout)
    seen: dict[str, set[tuple[str, ...]]] = {"forward": set(), "backward": set()}
    for name in seen:
        original = getattr(Layers, name)

        def look(*args: Any, name: str = name, original: Any = original, **more: Any) -> Any:
            seen[name].add(switches())
            return original(*args, **more)

        monkeypatch.setattr(Layers, name, look)
    simulator = Simulator(policy="early")
    with watched(simulator):
        case = Case(sort="llama of 2 layers", steps=(), update="none")
        with world.engine(case, device=AcceleratorDevice(simulator)) as engine:
            engine.step(make_batch(((1, 6),), seed=0))
    assert seen == {"forward": {ALL[:3]}, "backward": {ALL[:3]}}
    assert switches() == ALL
