"""`megatrain estimate`: will it fit, how fast, how long, what limits it; offline, at once.

    model (asked_models.py), machine (reference_machines.py, or what doctor measured here)
        ->  plan (plan.py)  ->  Estimate: for people (`print`), for programs (`to_json`)

Laws (tests/planning/test_estimate.py)
    1. Neither torch nor transformers nor matplotlib is imported for a known model.
    2. What does not fit says by how much, and each change it proposes, applied, fits.
    3. No line is longer than 80 columns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.config.quantities import read_bytes, read_number, read_tokens
from megatrain.errors import ConfigError
from megatrain.planning.asked_models import find_shape
from megatrain.planning.doctor import kept_examination
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.profile import MachineProfile
from megatrain.planning.reference_machines import find_machine
from megatrain.planning.workload import Workload
from megatrain.report.numbers import count, duration, figure, percent, size

BATCH_TOKENS = 131072
"""As in a config that does not say (train.batch_tokens)."""
_NAME = 20
_WIDE = 32
_PLACES = {
    "host": "host memory",
    "pinned": "of it pinned",
    "device": "device memory",
    "disk": "disk",
}
_LANES = {"compute": "compute", "in": "link in", "out": "link out", "host": "optimizer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A plan, and what it means for a number of tokens."""

    plan: Plan
    machine: str
    """Which machine, and where its figures are from."""
    tokens: int | None
    price_per_hour: float | None

    @property
    def fits(self) -> bool:
        return self.plan.fits

    @property
    def tokens_per_s(self) -> float:
        return self.plan.simulation.tokens_per_s

    @property
    def seconds(self) -> float | None:
        """Time for all tokens."""
        return None if self.tokens is None else self.tokens / self.tokens_per_s

    @property
    def cost(self) -> float | None:
        """Price of that time."""
        if self.seconds is None or self.price_per_hour is None:
            return None
        return self.seconds / 3600 * self.price_per_hour

    def __str__(self) -> str:
        plan = self.plan
        rows = [*self._head(), *self._memory()]
        if plan.fits:
            rows += [*self._speed(), *self._bill()]
        else:
            rows += ["does not fit. The cheapest changes that would:", *self._fixes()]
        return "\n".join(_cut(row) for row in rows)

    def to_json(self) -> str:
        """Return all of it as JSON text."""
        plan, model = self.plan, self.plan.workload.model
        facts: dict[str, Any] = {
            "model": model.name,
            "params": model.params,
            "active_params": model.active_params,
            "machine": self.machine,
            "fits": plan.fits,
            "step_tokens": plan.workload.step_tokens,
            "sequence": plan.workload.sequence,
            "bytes": {place: plan.ledger.total(place) for place in _PLACES},
            "available": self._available(),
            "ledger": [
                {"place": line.place, "purpose": line.purpose, "bytes": line.num_bytes}
                for line in plan.ledger.lines
            ],
            "settings": plan.settings.facts(),
            "step_s": plan.simulation.step_s,
            "tokens_per_s": self.tokens_per_s,
            "limit": plan.simulation.bottleneck,
            "busy": plan.simulation.busy_shares,
            "fixes": [str(fix) for fix in plan.fixes],
            "tokens": self.tokens,
            "seconds": self.seconds,
            "cost": self.cost,
        }
        return json.dumps(facts, indent=1)

    def draw(self, path: Path) -> None:
        """Write the two plots as one PNG. Raises ConfigError without matplotlib."""
        from megatrain.planning.plots import SpeedPoint, draw

        plan = self.plan
        here = SpeedPoint(
            step_tokens=plan.workload.step_tokens, tokens_per_s=self.tokens_per_s, allowed={}
        )
        path.write_bytes(draw(plan.profile, plan.workload, plan.settings, here))

    def _head(self) -> list[str]:
        model, workload = self.plan.workload.model, self.plan.workload
        active = ""
        if model.active_params < 0.95 * model.params:
            active = f", {figure(model.active_params)} active"
        about = f"{figure(model.params)} parameters{active}, {model.num_layers} layers"
        clipped = "not clipped" if workload.max_grad_norm is None else "clipped"
        work = f"{count(workload.step_tokens)} tokens in rows of {count(workload.sequence)}"
        return [
            _row("model", f"{model.name}: {about}"),
            _row("machine", self.machine),
            _row("a step", f"{work}, {workload.dtype}, {clipped}"),
            "",
        ]

    def _available(self) -> dict[str, int]:
        profile = self.plan.profile
        known = {"host": profile.ram_bytes, "device": profile.device_bytes}
        return {place: has for place, has in known.items() if has}

    def _memory(self) -> list[str]:
        ledger, available = self.plan.ledger, self._available()
        rows = []
        for place, name in _PLACES.items():
            lines = [line for line in ledger.lines if line.place == place]
            if not lines:
                continue
            total, has = ledger.total(place), available.get(place)
            told = "" if has is None else f"of {size(has)}"
            if has is not None and total > has:
                told += f", {size(total - has)} too many"
            rows.append(f"{name:{_WIDE}}{size(total):>12} {told}".rstrip())
            if place != "pinned":  # named under host already
                ordered = sorted(lines, key=lambda line: -line.num_bytes)
                rows += [
                    f"  {line.purpose:{_WIDE - 2}}{size(line.num_bytes):>12}" for line in ordered
                ]
        return [*rows, ""]

    def _speed(self) -> list[str]:
        simulation, settings = self.plan.simulation, self.plan.settings
        busy = simulation.busy_shares
        lanes = ", ".join(
            f"{name} {percent(busy[lane])}" for lane, name in _LANES.items() if busy.get(lane)
        )
        chosen = (
            f"micro-batches of {count(settings.micro_tokens)} tokens, {settings.slots} slots, "
            f"tape on the {settings.tape}"
        )
        speed = f"{self.tokens_per_s:,.0f} tokens/s, {duration(simulation.step_s)} a step"
        return [
            _row("speed", speed),
            _row("limited by", simulation.bottleneck),
            _row("busy", lanes),
            _row("settings", chosen),
            _row("", f"updates {settings.update.replace('_', ' ')}"),
        ]

    def _bill(self) -> list[str]:
        if self.seconds is None or self.tokens is None:
            return []
        told = duration(self.seconds)
        if self.cost is not None:
            told += f", cost {self.cost:,.2f} at {self.price_per_hour:g} an hour"
        return [_row(f"{figure(self.tokens)} tokens", told)]

    def _fixes(self) -> list[str]:
        return [f"  {fix}" for fix in self.plan.fixes] or ["  none was found: a larger machine"]


def estimate(
    model: str,
    *,
    gpu: str | None = None,
    ram: str | int | None = None,
    tokens: str | float | None = None,
    seq: str | int = 2048,
    batch_tokens: str | int = BATCH_TOKENS,
    price_per_hour: float | None = None,
) -> Estimate:
    """Return what training `model` would need and take.

    `gpu` is a name (`4090`) or a size (`24GB`); None: this machine, as `megatrain doctor` measured
    it. `ram` is the host memory a run may use. Raises ConfigError, ModelFolderError or
    ModelConfigError.
    """
    profile, machine = _machine(gpu, None if ram is None else _read("ram", ram, read_bytes))
    sequence = _read("seq", seq, read_tokens)
    workload = Workload(
        model=find_shape(model),
        step_tokens=max(sequence, _read("batch-tokens", batch_tokens, read_tokens)),
        sequence=sequence,
    )
    return Estimate(
        plan=make_plan(profile, workload),
        machine=machine,
        tokens=None if tokens is None else _read("tokens", tokens, read_tokens),
        price_per_hour=None if price_per_hour is None else float(read_number(price_per_hour)),
    )


def _machine(gpu: str | None, ram_bytes: int | None) -> tuple[MachineProfile, str]:
    """Return the profile, and how people know it."""
    if gpu is None:
        return _this_machine(ram_bytes)
    reference, device_bytes = find_machine(gpu)
    profile = reference.profile(ram_bytes=ram_bytes)
    name = reference.name
    if device_bytes is not None:
        profile = profile.changed(device_bytes=reference.usable(device_bytes))
        name = f"{gpu}, as fast as a {reference.name}"
    usual = "" if ram_bytes else ", host memory as usual"
    return profile, f"{name} (reference figures{usual})"


def _this_machine(ram_bytes: int | None) -> tuple[MachineProfile, str]:
    found = kept_examination()
    if found is None:
        raise ConfigError(
            "which machine? Give --gpu 4090 (or --gpu 24GB) and --ram 128GB, or run "
            "`megatrain doctor` here first"
        )
    profile = found.profile
    if ram_bytes is not None:
        profile = profile.changed(ram_bytes=ram_bytes)
    return profile, f"{profile.name} (measured {found.when})"


def _read(name: str, value: Any, read: Any) -> int:
    try:
        return int(read(value))
    except ValueError as error:
        raise ConfigError(f"--{name} is {str(value)[:60]}; {error}") from None


def _row(name: str, value: str) -> str:
    return f"{name:{_NAME}}{value}"


def _cut(line: str) -> str:
    return line if len(line) <= 80 else f"{line[:77]}..."
