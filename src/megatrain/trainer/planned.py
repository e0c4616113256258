"""The plan of a run: what `auto` becomes on a machine that `megatrain doctor` has measured.

Without a measured profile there is nothing to predict from: simple rules decide (resolve.py), and
the run says so. With one, every run is held to its prediction: plan.json has both.

Laws (tests/trainer/test_planned.py)
    1. What the config decides, the plan keeps; what it leaves open, the plan decides with a reason.
    2. A run that cannot fit is refused before its weights are read, with changes that would fit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.disk.folder import read_config_bytes
from megatrain.memory.host import free_bytes, resident_bytes
from megatrain.models.decoder import build_decoder
from megatrain.models.model_config import parse_config
from megatrain.pipeline.device import Device
from megatrain.planning.doctor import measured_profile
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.profile import MachineProfile
from megatrain.planning.search import Fixed
from megatrain.planning.workload import Workload, shape_of
from megatrain.trainer.resolve import Resolved


def plan_run(config: Config, device: Device, update: str) -> Plan | None:
    """Return the plan of a run that fits; None if this machine and device were never measured.

    Raises DoesNotFit, with what would fit, and what reading config.json raises.
    """
    profile = measured_profile()
    if profile is None or profile.unified == device.own_memory:
        return None
    plan = make_plan(_as_now(profile, config), _workload(config), _fixed(config, update))
    plan.require()
    return plan


def resolved_by(plan: Plan, resolved: Resolved) -> Resolved:
    """Return the settings with what the plan decided."""
    chosen = plan.settings
    return replace(
        resolved, micro_batch_tokens=chosen.micro_tokens, slots=chosen.slots, tape=chosen.tape
    )


def predicted_against_measured(plan: Plan, step_seconds: list[float]) -> str:
    """Return what was foretold of a step, and what came, in one line."""
    measured = _median(step_seconds)
    return (
        f"a step: {plan.step_s:.3g} s predicted, {measured:.3g} s measured "
        f"({measured / plan.step_s - 1:+.0%}); limited by {plan.bottleneck}"
    )


def facts(plan: Plan, step_seconds: list[float]) -> dict[str, Any]:
    """Return the plan for plan.json, with what was measured of a step so far."""
    told = plan.facts()
    del told["settings"]
    if step_seconds:
        told["measured_step_s"] = _median(step_seconds)
    return told


def _as_now(profile: MachineProfile, config: Config) -> MachineProfile:
    """Return the machine with the memory that is free now, within what the config allows."""
    held, ram, vram = resident_bytes(), config.memory.ram, config.memory.vram
    changes: dict[str, Any] = {
        "ram_bytes": ram if isinstance(ram, int) else free_bytes() + held,
        "base_bytes": held,
    }
    if isinstance(vram, int) and not profile.unified:
        changes["device_bytes"] = min(vram, profile.device_bytes)
    return profile.changed(**changes)


def _workload(config: Config) -> Workload:
    model = config.model
    attn = None if model.attn == "auto" else model.attn
    parsed = parse_config(read_config_bytes(Path(model.name_or_path)))
    decoder = build_decoder(parsed, model.dtype, model.frozen, attn)
    return Workload(
        model=shape_of(decoder, Path(model.name_or_path).name),
        step_tokens=config.train.batch_tokens,
        sequence=config.data.max_length,
        dtype=model.dtype,
        packed=config.data.packing,
        max_grad_norm=config.train.max_grad_norm,
    )


def _fixed(config: Config, update: str) -> Fixed:
    micro, memory = config.train.micro_batch_tokens, config.memory
    return Fixed(
        micro_tokens=micro if isinstance(micro, int) else None,
        slots=memory.slots if isinstance(memory.slots, int) else None,
        tape=memory.tape if memory.tape != "auto" else None,
        update=update,
        chunk_tokens=memory.chunk_tokens,
        gather_embedding=memory.gather_embedding,
    )


def _median(seconds: list[float]) -> float:
    """Return the usual time of a step; the first ones warm up."""
    usual = sorted(seconds[2:] or seconds)
    return usual[len(usual) // 2]
