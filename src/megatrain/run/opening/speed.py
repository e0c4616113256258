"""What makes layers and updates fast or slow in a run: checked early, and told."""

from __future__ import annotations

from megatrain.config import Config
from megatrain.devices.device import Device
from megatrain.engine.compute.fused import require_liger
from megatrain.engine.machine import waits_for_experts
from megatrain.models.decoder import Decoder
from megatrain.optim.native import load_kernel
from megatrain.optim.torch_kernel import TorchKernel
from megatrain.planning.from_config import compile_choice


def require_kernels(config: Config, device: Device) -> None:
    """Raise MissingPackage or ConfigError unless `train.kernels` can run on the device."""
    if config.train.kernels == "liger":
        require_liger(device)


def speed_notes(config: Config, decoder: Decoder, device: Device) -> list[str]:
    """Return what the user should know of the speed of layers and updates."""
    compiles, reason = compile_choice(config, unified=not device.own_memory)
    notes = []
    if config.train.compile == "auto":
        notes.append(f"compile: auto is {'on' if compiles else 'off'}: {reason}")
    if waits_for_experts(decoder, device, compiles=compiles):
        notes.append(
            f"experts: torch has no kernel for their products on {device.name}, so the host waits "
            "for the device twice in each layer and micro-batch; larger micro-batches wait less"
        )
    kernel = load_kernel()
    if isinstance(kernel, TorchKernel):
        notes.append(
            f"updates: kernel {kernel.description}, same results, slower. For the fast one install "
            "a wheel of MegaTrain, or install a C compiler and then MegaTrain again"
        )
    return notes
