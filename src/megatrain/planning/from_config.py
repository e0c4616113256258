"""The run that a config describes, as the planner sees it: one reading for `estimate` and `train`.

Law (tests/planning/test_from_config.py): on one machine, one config has one plan, whoever asks.
"""

from __future__ import annotations

from megatrain.config import Config
from megatrain.optim.states import STATES
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.search import Fixed
from megatrain.planning.workload import ModelShape, Workload


def workload_of(config: Config, model: ModelShape) -> Workload:
    """Return what one step of the run works on."""
    return Workload(
        model=model,
        step_tokens=config.step_tokens,
        batch_rows=config.train.batch_rows,
        sequence=config.data.max_length,
        dtype=config.model.dtype,
        attn=config.model.attn,
        packed=config.data.packing,
        max_grad_norm=config.train.max_grad_norm,
        states=STATES[config.optim.name],
    )


def fixed_by(config: Config) -> Fixed:
    """Return what the config decides; `auto` is left to the plan."""
    micro, memory = config.train.micro_batch_tokens, config.memory
    return Fixed(
        micro_batch_tokens=None if micro == "auto" else micro,
        slots=None if memory.slots == "auto" else memory.slots,
        tape=None if memory.tape == "auto" else memory.tape,
        chunk_tokens=None if memory.chunk_tokens == "auto" else memory.chunk_tokens,
        gather_embedding=None if memory.gather_embedding == "auto" else memory.gather_embedding,
    )


def within(profile: MachineProfile, config: Config) -> MachineProfile:
    """Return the machine with no more memory than `memory.ram` and `memory.vram` allow."""
    ram, vram = config.memory.ram, config.memory.vram
    if isinstance(ram, int):
        profile = profile.changed(ram_bytes=min(ram, profile.ram_bytes))
    if isinstance(vram, int) and not profile.unified:
        profile = profile.changed(device_bytes=min(vram, profile.device_bytes))
    return profile
