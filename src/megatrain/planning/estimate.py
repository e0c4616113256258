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
from megatrain.files import write_file
from megatrain.memory.host import free_bytes
from megatrain.numbers import duration, figure, size
from megatrain.planning.asked_models import find_shape
from megatrain.planning.doctor import kept_examination
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.profile import MachineProfile
from megatrain.planning.reference_machines import find_machine
from megatrain.planning.search import shortfalls
from megatrain.planning.workload import Workload

BATCH_TOKENS = 131072
"""As in a config that does not say (train.batch_tokens)."""


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
        lines = [*self._head(), *str(self.plan).splitlines(), *self._bill()]
        return "\n".join(line if len(line) <= 80 else f"{line[:77]}..." for line in lines)

    def to_json(self) -> str:
        """Return all of it as JSON text."""
        plan, workload = self.plan, self.plan.workload
        facts: dict[str, Any] = plan.facts() | {
            "machine": self.machine,
            "params": workload.model.params,
            "active_params": workload.model.active_params,
            "step_tokens": workload.step_tokens,
            "sequence": workload.sequence,
            "available": {"host": plan.profile.ram_bytes, "device": plan.profile.device_bytes},
            "short": shortfalls(plan.profile, plan.ledger),
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
        write_file(path, draw(plan.profile, plan.workload, plan.settings, here), durable=False)

    def _head(self) -> list[str]:
        model = self.plan.workload.model
        rows = [_row("machine", self.machine)]
        if model.active_params < 0.95 * model.params:
            share = f"{figure(model.active_params)} of {figure(model.params)} parameters"
            rows.append(_row("experts", f"a token uses {share}"))
        return rows

    def _bill(self) -> list[str]:
        if not self.fits:
            missing = shortfalls(self.plan.profile, self.plan.ledger)
            told = ", ".join(f"{place} memory {size(short)}" for place, short in missing.items())
            return ["", _row("short of", told)]
        if self.seconds is None or self.tokens is None:
            return []
        told = f"{figure(self.tokens)} tokens in {duration(self.seconds)}"
        if self.cost is not None:
            told += f", cost {self.cost:,.2f} at {self.price_per_hour:g} an hour"
        return ["", _row("in all", told)]


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
    it. `ram` is the host memory a run may use; None: what is free here, or usual there. Raises
    ConfigError, ModelFolderError or ModelConfigError.
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
    profile = found.profile.changed(ram_bytes=ram_bytes or max(1, free_bytes()))
    return profile, f"{profile.name} (measured {found.when})"


def _read(name: str, value: Any, read: Any) -> int:
    try:
        return int(read(value))
    except ValueError as error:
        raise ConfigError(f"--{name} is {str(value)[:60]}; {error}") from None


def _row(name: str, value: str) -> str:
    return f"{name:10}{value}"
