"""The plan of a run: what `auto` becomes, and whether the run fits.

On a machine that `megatrain doctor` has measured the planner decides, and every run is held to its
prediction: plan.json has both. Elsewhere simple rules decide (resolve.py), unless memory is too
small for them and the planner finds settings that fit; memory needs no measuring.

Laws (tests/trainer/test_planned.py)
    1. What the config decides, the plan keeps; what it leaves open, the plan decides with a reason.
    2. A run that cannot fit is refused before its weights are read, with changes that would fit.
    3. Memory that is free, `memory.ram` and `memory.vram` are what it has to fit into.
    4. No run that was started is killed for its memory (`python -m benchmarks.plan --cap`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.memory.host import free_bytes, give_back_at_once, resident_bytes
from megatrain.models.decoder import Decoder
from megatrain.pipeline.device import Device
from megatrain.planning.doctor import measured_profile
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.profile import MachineProfile, unmeasured
from megatrain.planning.search import HOST_HEADROOM, Fixed
from megatrain.planning.workload import Workload, shape_of
from megatrain.trainer.resolve import Resolved

LATER_BYTES = 96 << 20
"""What Python and libraries come to hold once a run has begun: modules, threads, their caches."""
TIGHT = 1.3
"""With less than this, in shares of the ledger, malloc must not keep what is freed."""


def plan_run(
    config: Config, device: Device, resolved: Resolved, decoder: Decoder
) -> tuple[Resolved, Plan]:
    """Return settings that fit, and their plan. Raises DoesNotFit, with what would fit."""
    resolved, plan = _planned(config, device, resolved, _workload(config, decoder))
    if not device.own_memory and plan.profile.ram_bytes < TIGHT * plan.ledger.total("host"):
        give_back_at_once()
    return resolved, plan


def _planned(
    config: Config, device: Device, resolved: Resolved, workload: Workload
) -> tuple[Resolved, Plan]:
    fixed = _fixed(config, resolved.update)
    measured = measured_profile()
    if measured is not None and measured.unified != device.own_memory:
        plan = make_plan(_as_now(measured, config), workload, fixed)
        _require(plan, config)
        return _resolved_by(plan, resolved), plan
    machine = _as_now(unmeasured(ram_bytes=1, base_bytes=0, device_bytes=device.free_bytes), config)
    plan = make_plan(machine, workload, _by_rules(fixed, resolved))
    if not plan.fits:
        plan = make_plan(machine, workload, fixed)
        _require(plan, config)
    return _resolved_by(plan, resolved), plan


def _resolved_by(plan: Plan, resolved: Resolved) -> Resolved:
    """Return the settings with what the plan decided."""
    chosen = plan.settings
    return replace(
        resolved, micro_batch_tokens=chosen.micro_tokens, slots=chosen.slots, tape=chosen.tape
    )


def _require(plan: Plan, config: Config) -> None:
    """Raise DoesNotFit unless the plan fits; a cap of the config's is the first thing to change."""
    needed = int(plan.ledger.total("host") * HOST_HEADROOM)
    ways = []
    if isinstance(config.memory.ram, int) and config.memory.ram < needed < _free_for_us():
        ways.append(f"memory.ram: {-(-needed // 10**6)}MB")
    plan.require(*ways)


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
    ram, vram = config.memory.ram, config.memory.vram
    changes: dict[str, Any] = {
        "ram_bytes": min(ram, _free_for_us()) if isinstance(ram, int) else _free_for_us(),
        "base_bytes": resident_bytes() + LATER_BYTES,
    }
    if isinstance(vram, int) and not profile.unified:
        changes["device_bytes"] = min(vram, profile.device_bytes)
    return profile.changed(**changes)


def _free_for_us() -> int:
    """Return what this process holds and could still have."""
    return free_bytes() + resident_bytes()


def _workload(config: Config, decoder: Decoder) -> Workload:
    model = config.model
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


def _by_rules(fixed: Fixed, resolved: Resolved) -> Fixed:
    """Return what the config decides, and for the rest what the simple rules say."""
    return replace(
        fixed,
        micro_tokens=resolved.micro_batch_tokens,
        slots=resolved.slots,
        tape=resolved.tape,
    )


def _median(seconds: list[float]) -> float:
    """Return the usual time of a step; the first ones warm up."""
    usual = sorted(seconds[2:] or seconds)
    return usual[len(usual) // 2]
