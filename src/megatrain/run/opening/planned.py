"""The plan of a run: what `auto` becomes, and whether the run fits.

On a machine that `megatrain doctor` has measured the planner decides, and every run is held to its
prediction: plan.json has both. Elsewhere simple rules decide (resolve.py), unless memory is too
small for them and the planner finds settings that fit; memory needs no measuring.

Laws (tests/run/opening/test_planned.py)
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
from megatrain.devices.device import Device
from megatrain.memory.host import free_bytes, give_back_at_once, peak_resident_bytes, resident_bytes
from megatrain.models.decoder import Decoder
from megatrain.planning.from_config import fixed_by, within, workload_of
from megatrain.planning.machine.examination import measured_profile
from megatrain.planning.machine.profile import MachineProfile, unmeasured
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.search import HOST_HEADROOM, Fixed
from megatrain.planning.workload import shape_of
from megatrain.run.opening.resolve import Resolved
from megatrain.text import duration

LATER_BYTES = 96 << 20
"""What Python and libraries come to hold once a run has begun: modules, threads, their caches."""
UNMEASURED = (
    "this machine was not measured: auto is by simple rules, and no time can be predicted nor\n"
    "held against a bound. `megatrain doctor` measures it"
)
TIGHT = 1.3
"""With less than this, in shares of the ledger, malloc must not keep what is freed."""


def plan_run(
    config: Config, device: Device, resolved: Resolved, decoder: Decoder
) -> tuple[Resolved, Plan]:
    """Return settings that fit, and their plan. Raises DoesNotFit, with what would fit."""
    base_bytes = resident_bytes() + LATER_BYTES
    plan = _planned(config, device, resolved, decoder, fixed_by(config), base_bytes)
    _require(plan, config)
    return _adopted(plan, device, resolved), plan


def plan_resumed(
    config: Config, device: Device, resolved: Resolved, decoder: Decoder, base_bytes: int
) -> tuple[Resolved, Plan]:
    """Return the plan of a run that continues, its model loaded already, and its settings.

    Micro-batches and chunks stay as in `resolved`: others would give other bits. `base_bytes` is
    what the process held before its model. What ran before is not refused for its memory.
    """
    fixed = replace(
        fixed_by(config),
        micro_batch_tokens=resolved.micro_batch_tokens,
        chunk_tokens=resolved.chunk_tokens,
        kept=frozenset({"micro_batch_tokens", "chunk_tokens"}),
    )
    plan = _planned(config, device, resolved, decoder, fixed, base_bytes + LATER_BYTES)
    return _adopted(plan, device, resolved), plan


def _planned(
    config: Config,
    device: Device,
    resolved: Resolved,
    decoder: Decoder,
    fixed: Fixed,
    base_bytes: int,
) -> Plan:
    workload = workload_of(config, shape_of(decoder, Path(config.model.name_or_path).name))
    measured = measured_profile()
    if measured is not None and measured.unified != device.own_memory:
        return make_plan(_as_now(measured, config, base_bytes), workload, fixed)
    unknown = unmeasured(ram_bytes=1, base_bytes=0, device_bytes=device.free_bytes)
    machine = _as_now(unknown, config, base_bytes)
    plan = make_plan(machine, workload, _by_rules(fixed, resolved))
    return plan if plan.fits else make_plan(machine, workload, fixed)


def _adopted(plan: Plan, device: Device, resolved: Resolved) -> Resolved:
    """Return the settings with what the plan decided; where memory is tight, malloc is told."""
    if not device.own_memory and plan.profile.ram_bytes < TIGHT * plan.ledger.total("host"):
        give_back_at_once()
    chosen = plan.settings
    return replace(
        resolved,
        micro_batch_tokens=chosen.micro_batch_tokens,
        slots=chosen.slots,
        tape=chosen.tape,
        chunk_tokens=chosen.chunk_tokens,
        gather_embedding=chosen.gather_embedding or resolved.gather_embedding,
    )


def _require(plan: Plan, config: Config) -> None:
    """Raise DoesNotFit unless the plan fits; a cap of the config's is the first thing to change."""
    needed = int(plan.ledger.total("host") * HOST_HEADROOM)
    ways = []
    if isinstance(config.memory.ram, int) and config.memory.ram < needed < _free_for_us():
        ways.append(f"memory.ram={-(-needed // 10**6)}MB")
    plan.require(*ways)


def in_words(plan: Plan, num_steps: int) -> str:
    """Return the plan for people, with the time of the whole run where the machine is known."""
    if not plan.knows_time:
        return f"{plan}\n{UNMEASURED}"
    if not plan.fits:
        return str(plan)
    whole = duration(num_steps * plan.step_s)
    return f"{plan}\n\nin all    {num_steps:,} steps in {whole}, without evaluations and saves"


def predicted_against_measured(plan: Plan, step_seconds: list[float]) -> str:
    """Return the predicted and the measured time of a step, in one line."""
    measured = _median(step_seconds)
    return (
        f"a step: {plan.step_s:.3g} s predicted, {measured:.3g} s measured "
        f"({measured / plan.step_s - 1:+.0%}); limited by {plan.bottleneck}"
    )


def facts(
    plan: Plan, device: Device, resolved: Resolved, step_seconds: list[float]
) -> dict[str, Any]:
    """Return plan.json: the plan, the settings in use, and what was measured until now."""
    measured = {
        "host_peak_bytes": peak_resident_bytes(),
        "device_peak_bytes": device.peak_bytes,
    }
    found = plan.facts() | {"measured": measured, "settings": resolved.facts()}
    if step_seconds:
        found["measured_step_s"] = _median(step_seconds)
    return found


def _as_now(profile: MachineProfile, config: Config, base_bytes: int) -> MachineProfile:
    """Return the machine with the memory that is free now, within what the config allows."""
    return within(profile.changed(ram_bytes=_free_for_us(), base_bytes=base_bytes), config)


def _free_for_us() -> int:
    """Return what this process holds and could still have."""
    return free_bytes() + resident_bytes()


def _by_rules(fixed: Fixed, resolved: Resolved) -> Fixed:
    """Return what the config decides, and for the rest what the simple rules say."""
    return replace(
        fixed,
        micro_batch_tokens=resolved.micro_batch_tokens,
        slots=resolved.slots,
        tape=resolved.tape,
        chunk_tokens=resolved.chunk_tokens,
        gather_embedding=resolved.gather_embedding,
    )


def _median(seconds: list[float]) -> float:
    """Return the usual time of a step; the first ones warm up."""
    usual = sorted(seconds[2:] or seconds)
    return usual[len(usual) // 2]
