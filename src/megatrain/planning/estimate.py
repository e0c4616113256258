"""`megatrain estimate`: will it fit, how fast, how long, what limits it; offline, at once.

    config (a run's YAML, or a model's name with key=value settings)
        ->  model (asked_models.py), machine (reference_machines.py, or what doctor measured here)
        ->  plan (plan.py)  ->  Estimate: for people (`print`), for programs (`to_json`)

The config is read as `train` reads it (from_config.py), so both plan the same run.

Laws (tests/planning/test_estimate.py)
    1. Neither torch nor transformers is imported for a known model.
    2. A plan that does not fit reports by how much, and each change it proposes, applied, fits.
    3. The first line is the verdict. No other line is longer than 80 columns.
    4. On the same machine `train` makes the same plan of the same config; only the data, which
       `estimate` does not read, may make the steps of `train` shorter (step_size.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain.choices import BaseForm
from megatrain.config import Config, load_config
from megatrain.config.load import resolve_config
from megatrain.config.quantities import (
    read_bytes,
    read_count,
    read_memory,
    read_number,
    read_tokens,
)
from megatrain.config.yaml_reader import Document
from megatrain.errors import ConfigError
from megatrain.memory.host import free_bytes
from megatrain.planning.alternatives import alternatives, planned
from megatrain.planning.catalog.asked_machines import find_machine, is_apple
from megatrain.planning.catalog.asked_models import shape_for
from megatrain.planning.catalog.known_models import known_models
from megatrain.planning.catalog.networks import NETWORKS, find_network
from megatrain.planning.catalog.reference_machines import MACHINES, ReferenceMachine
from megatrain.planning.from_config import (
    INSTALL,
    free_on_disk,
    linear_attention_installed,
    linear_attention_path,
    within,
)
from megatrain.planning.longest import LONGEST_ROW
from megatrain.planning.machine.examination import kept_examination
from megatrain.planning.machine.profile import MEASURED, MachineProfile
from megatrain.planning.machine.reserve import left_by_system, with_one_budget, with_reserve
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.narrow_products import gain
from megatrain.planning.plan import Plan, within_80
from megatrain.planning.prediction import (
    predicted_price,
    predicted_speed,
    predicted_time,
    time_range,
    with_range,
)
from megatrain.planning.ranks.division import SOLE_RANK, Division
from megatrain.planning.ranks.sharing import as_rank
from megatrain.planning.rollouts import RolloutPlan, plan_rollouts
from megatrain.planning.search import capacities, shortfalls
from megatrain.text import figure, printable

NO_BF16 = "the fp32 rate and model.attn=eager"
"""What is assumed of a card without units for bf16."""
USUAL_TOKENS = 10_000_000
"""Tokens that a price is for if none are given: a few thousand rows for a few epochs."""
PROMPT_TOKENS = 256
"""Tokens of a prompt of --rollouts."""
SHORT_FOR = {
    "lora": "lora.rank", "base": "model.base", "seq": "data.max_length",
    "batch-tokens": "train.batch_tokens",
}  # fmt: skip
"""Options that are short for a setting."""
MOST_RANKS = 4096
"""Most GPUs of a host, or hosts: more is a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A plan, and its time and cost for a number of tokens."""

    plan: Plan
    machine: str
    """Which machine, as it was asked for."""
    figures: str
    """Source of the machine's figures."""
    has_bf16: bool = True
    """Its device has units for bf16."""
    tokens: int | None
    price_per_hour: float | None
    scales_positions: bool = False
    """The config makes the model reach further than it declares."""
    rollouts: RolloutPlan | None = None
    """How the answers of a step are drawn, if they are."""
    draws: bool = False
    """Answers are drawn, whether it is known how long that takes or not."""
    alternatives: tuple[str, ...] = ()
    """Alternatives to a plan that does not fit: adapters, and a smaller model, if they fit."""

    @property
    def fits(self) -> bool:
        return self.plan.fits

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all machines, with the time in which answers are drawn."""
        if self.rollouts is not None:
            return self.plan.workload.step_tokens / self.rollouts.step_s
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
        return self.text()

    def text(self, *, details: bool = False) -> str:
        """Return the verdict in one line, ways out if it does not fit, then the figures."""
        ways = [] if self.fits else self.plan.ways_out(*self.alternatives)
        rows = [*ways, "", *self._head(), *self.plan.text(details=details).splitlines()]
        return "\n".join([self.verdict(), *map(within_80, rows)])

    def verdict(self) -> str:
        """Return in one line whether it fits, how fast, and what all tokens take."""
        return self.plan.verdict(self.whole, predicted_speed(self.tokens_per_s))

    def to_json(self) -> str:
        """Return all of it as JSON text."""
        plan, workload = self.plan, self.plan.workload
        facts: dict[str, Any] = plan.facts() | {
            "machine": self.machine,
            "figures": self.figures,
            "weights": workload.model.weights,
            "params": workload.model.params,
            "carried_params": workload.model.carried_params,
            "active_params": workload.model.active_params,
            "trained_params": workload.model.trained_params,
            "step_tokens": workload.step_tokens,
            "sequence": workload.sequence,
            "alternatives": list(self.alternatives),
            "available": capacities(plan.profile),
            "short": shortfalls(plan.profile, plan.ledger),
            "tokens": self.tokens,
            **_ranges("seconds", self.seconds),
            **_ranges("cost", self.cost),
            "rollouts": None if self.rollouts is None else self.rollouts.facts(),
        }
        return json.dumps(facts, indent=1)

    def _head(self) -> list[str]:
        model = self.plan.workload.model
        rows = [_row("machine", self.machine), _row("figures", self.figures)]
        if not self.has_bf16 and not self.plan.profile.on_host:
            rows.append(_row("no bf16", "products run on the fp32 units, attention is not fused:"))
            rows.append(_row("", f"planned with {NO_BF16}; untested"))
        if model.weights and not (model.published and model.narrow_params):
            rows.append(_row("weights", model.weights))
        if self.plan.workload.kernels == "liger":
            rows.append(_row("kernels", f"liger, of {INSTALL}"))
        if (path := self._linear_attention()) and not self.plan.profile.on_host:
            rows.append(_row("attention", f"linear: {path}"))
        rows += [_row("products", line) for line in self._products()]
        if model.carried_params:
            rows.append(_row("carried", f"{figure(model.carried_params)} parameters besides text"))
        if model.active_params < 0.95 * model.params:
            share = f"{figure(model.active_params)} of {figure(model.params)} parameters"
            rows.append(_row("experts", f"a token uses {share}"))
        if model.is_adapted:
            trained = f"{figure(model.trained_params)} of {figure(model.params)} parameters"
            rows.append(_row("adapters", f"{trained} are trained; the base is frozen"))
            if narrow := model.narrow_params:
                each = sum(block.narrow_bytes for block in model.blocks) / narrow
                share = f"{figure(narrow)} of them in {each:.2f} bytes each"
                rows.append(_row("base", f"{share}, widened on the device"))
        if self.rollouts is not None:
            first, *others = self.rollouts.lines()
            rows += [_row("rollouts", first), *(_row("", line) for line in others)]
        if not self.plan.workload.packed and not model.packs:
            rows.append(_row("packing", f"none: {model.family} mixes the documents of packed rows"))
        length, most = self.plan.workload.sequence, model.positions
        if most is not None and length > most and not self.scales_positions:
            rows.append(
                _row("rows", f"longer than the {most:,} positions of the model: model.rope")
            )
        return rows

    def _linear_attention(self) -> str:
        """Return what computes it; a machine of the catalog is taken to have the kernels."""
        return linear_attention_path(
            self.plan.workload.model.family,
            has_triton=True,
            installed=self.plan.profile.source != MEASURED or linear_attention_installed(),
        )

    def _products(self) -> list[str]:
        """Return what is assumed of products in fp8."""
        plan = self.plan
        if plan.workload.products == "plain":
            return []
        times = gain(plan.profile, plan.workload)
        if times == 1.0:
            return ["fp8: this machine multiplies no faster so, and narrowing takes time"]
        return [f"fp8, {times:g} times the rate of bf16 by its sheet: predicted, untested"]

    @property
    def whole(self) -> str:
        """The time and the price of all tokens, for people."""
        if self.seconds is None or self.tokens is None:
            return ""
        text = f"{figure(self.tokens)} tokens in {predicted_time(self.seconds)}"
        if self.draws:
            text += " with drawing" if self.rollouts is not None else " without drawing"
        if self.cost is not None:
            text += f" for {predicted_price(self.cost)} at ${self.price_per_hour:g} an hour"
        return text


def estimate(
    model: str,
    overrides: Sequence[str] = (),
    *,
    gpu: str | None = None,
    ram: str | int | None = None,
    tokens: str | float | None = None,
    seq: str | int | None = None,
    batch_tokens: str | int | None = None,
    lora: int | None = None,
    base: BaseForm | None = None,
    rollouts: str | None = None,
    disk: str | int | None = None,
    price: str | float | None = None,
    gpus: int = 1,
    hosts: int = 1,
    network: str | None = None,
) -> Estimate:
    """Return what training `model` would need and take.

    `model` is a known name, a model folder, a config.json, or the YAML file of a run; `overrides`
    are settings like `train.max_grad_norm=null`. `gpu` is a name (`4090`), a size (`24GB`) or
    `none`; None: this machine, as `megatrain doctor` measured it. `ram` is the installed host
    memory, as modules are sold (64GB are 64 GiB), of which the system keeps some (reserve.py);
    None: the free memory here, or the usual one. `disk` is the free space of `memory.disk`; None:
    what is free there, or the usual 2 TB. `seq`, `batch_tokens`, `lora` and `base` are
    data.max_length, train.batch_tokens, lora.rank and model.base. `gpus` are those of each
    host, one rank on each, `hosts` are equal and have `ram` each, and `network` is between them: a
    name like `25GbE`, or `3GB/s`.
    `rollouts`, like 64x1024, is a step on rewards: so many answers of so many tokens, 8 to each
    prompt of 256 tokens; more exact settings are those of a run.yaml.
    `price` is that of all machines for an hour; without `tokens` it is for 10M of them.
    Raises ConfigError, ModelFolderError or ModelConfigError.
    """
    run = asked_run(
        model,
        overrides,
        gpu=gpu,
        ram=ram,
        seq=seq,
        batch_tokens=batch_tokens,
        lora=lora,
        base=base,
        rollouts=rollouts,
        disk=disk,
        division=_division(gpus, hosts, network),
        network=network,
    )
    plan = run.plan()
    if tokens is None and price is not None:
        tokens = USUAL_TOKENS
    return Estimate(
        plan=plan,
        alternatives=() if plan.fits else alternatives(*run.planned),
        machine=run.machine,
        figures=run.figures,
        has_bf16=run.has_bf16,
        tokens=None if tokens is None else _read("tokens", tokens, read_count),
        price_per_hour=None if price is None else read_price(price),
        scales_positions=run.config.model.rope is not None,
        rollouts=plan_rollouts(run.config, plan),
        draws=run.config.loss.draws,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRun:
    """A run on a machine, as it was asked for and before it is planned."""

    config: Config
    profile: MachineProfile
    model: ModelShape
    division: Division
    machine: str
    figures: str
    has_bf16: bool

    @property
    def planned(self) -> tuple[Config, MachineProfile, ModelShape, Division]:
        """The facts that a plan is made from."""
        return self.config, self.profile, self.model, self.division

    def plan(self) -> Plan:
        """Return its plan, whether it fits or not."""
        return planned(*self.planned)


def asked_run(
    model: str,
    overrides: Sequence[str] = (),
    *,
    gpu: str | None = None,
    ram: str | int | None = None,
    seq: str | int | None = None,
    batch_tokens: str | int | None = None,
    lora: int | None = None,
    base: BaseForm | None = None,
    rollouts: str | None = None,
    disk: str | int | None = None,
    division: Division = SOLE_RANK,
    network: str | None = None,
) -> AskedRun:
    """Return the run that these options of `estimate` mean. Raises as `estimate` does."""
    options = {"lora": lora, "base": base, "seq": seq, "batch-tokens": batch_tokens}
    for name, key in SHORT_FOR.items():
        if options[name] is not None and any(one.split("=")[0].strip() == key for one in overrides):
            raise ConfigError(f"--{name} is short for {key}, and both are given. Leave one out.")
    if disk is not None:  # its size is given, so its path does not matter
        overrides = ["memory.disk=.", *overrides]
    if lora is not None:
        overrides = [f"lora.rank={lora}", *overrides]
    if base is not None:
        overrides = [f"model.base={base}", *overrides]
    if rollouts is not None:
        words, new_tokens = _drawn(rollouts)
        overrides = [*words, *overrides]
        seq = new_tokens + PROMPT_TOKENS if seq is None else seq
    config = _config(model, overrides, seq, batch_tokens)
    if config.data.max_length > LONGEST_ROW:
        raise ConfigError(
            f"data.max_length is {config.data.max_length}: no plan is made for rows of more than "
            f"{LONGEST_ROW:,} tokens. Lower --seq, or data.max_length."
        )
    installed = None if ram is None else _read("ram", ram, read_memory)
    profile, machine, figures, bf16 = _machine(gpu, installed, division)
    if not bf16 and not profile.on_host and config.model.attn == "auto":
        eager = config.model.model_copy(update={"attn": "eager"})
        config = config.model_copy(update={"model": eager})
    profile = _connected(as_rank(profile, division), division, network)
    if config.memory.device == "cpu" and not profile.on_host:
        raise ConfigError(
            f"memory.device is cpu, but {machine} computes on its GPU. Set memory.device=auto"
        )
    if disk is not None:
        profile = profile.changed(disk_bytes=_read("disk", disk, read_bytes))
    elif gpu is None:
        profile = profile.changed(disk_bytes=free_on_disk(config))
    return AskedRun(
        config=config,
        profile=with_reserve(within(with_one_budget(profile), config)),
        model=shape_for(config),
        division=division,
        machine=machine,
        figures=figures,
        has_bf16=bf16,
    )


def _drawn(rollouts: str) -> tuple[list[str], int]:
    """Return the settings of a step on rewards like 64x1024, and the tokens of an answer."""
    parts = rollouts.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"rollouts is {rollouts}; give answers and tokens of each, like 64x1024.")
    answers, tokens = map(int, parts)
    samples = next((n for n in (8, 4, 2) if answers % n == 0), answers)
    if samples < 2:
        raise ConfigError("rollouts: give at least two answers, which are compared.")
    return [
        "loss.name=grpo",
        f"rollouts.samples={samples}",
        f"rollouts.max_new_tokens={tokens}",
        "train.batch_tokens=null",
        f"train.batch_rows={answers // samples}",
    ], tokens


def read_price(value: str | float) -> float:
    """Return a price of an hour. Raises ConfigError."""
    try:
        price = float(read_number(value))
    except ValueError as error:
        raise ConfigError(f"--price is {str(value)[:60]}; {error}, like 0.34") from None
    if price < 0:
        raise ConfigError(f"--price is {value}; give a price of an hour, 0 or more")
    return price


def _division(gpus: int, hosts: int, network: str | None) -> Division:
    """Return the ranks that are asked for. Raises ConfigError."""
    for name, number in (("gpus", gpus), ("hosts", hosts)):
        if not 1 <= number <= MOST_RANKS:
            raise ConfigError(f"--{name} is {number}, must be between 1 and {MOST_RANKS:,}")
    if hosts > 1 and network is None:
        raise ConfigError(
            f"--hosts is {hosts}: what is between them? Give --network 25GbE, or 3GB/s"
        )
    if hosts == 1 and network is not None:
        raise ConfigError(
            f"--network {network[:60]}: it is between hosts, and --hosts is 1. Leave it out, or "
            "give the number of hosts"
        )
    return Division(num_hosts=hosts, per_host=gpus)


def _connected(profile: MachineProfile, division: Division, network: str | None) -> MachineProfile:
    """Return the machine of a rank with the network that its host has."""
    if network is None:
        return profile
    found = find_network(network)
    assert profile.network is not None, division
    between = replace(
        profile.network, host_bytes_per_s=found.bytes_per_s, host_latency_s=found.latency_s
    )
    return profile.changed(network=between)


def _config(
    model: str,
    overrides: Sequence[str],
    seq: str | int | None,
    batch_tokens: str | int | None,
) -> Config:
    """Return the config of a file, or the one that a model and settings alone would be."""
    given = []
    if seq is not None:
        given.append(f"data.max_length={_read('seq', seq, read_tokens)}")
    if batch_tokens is not None:
        given.append(f"train.batch_tokens={_read('batch-tokens', batch_tokens, read_tokens)}")
    if Path(model).suffix in (".yaml", ".yml"):
        return load_config(model, [*given, *overrides])
    bare = {"model": {"name_or_path": model}, "data": {"train": "your own rows"}}
    return resolve_config(Document(name="estimate", value=bare), [*given, *overrides])


def _machine(
    gpu: str | None, installed: int | None, division: Division
) -> tuple[MachineProfile, str, str, bool]:
    """Return the profile, how people know it, where its figures are from, and if it has bf16."""
    ram_bytes = None if installed is None else left_by_system(installed)
    if gpu is None:
        return *_this_machine(ram_bytes), True
    reference, device_bytes = find_machine(gpu)
    if ram_bytes is not None and reference.integrated:
        ram_bytes = min(ram_bytes, reference.ram_gib << 30)
    profile = reference.profile(ram_bytes=ram_bytes, per_host=division.per_host)
    name = reference.name
    if device_bytes is not None:
        profile = profile.changed(device_bytes=reference.usable(device_bytes))
        profile = profile.changed(name=f"{gpu.strip()} card")
        name = f"{profile.name}, as fast as {reference.name}"
    if is_apple(gpu):
        name = f"{printable(gpu.strip())[:40]}: its CPU, as 8 cores of a desktop"
    origin = "assumed" if reference.on_host else "published"
    origin += ", not measured" + ("" if ram_bytes else "; host memory assumed")
    if min(reference.sockets, division.per_host) > 1:
        origin += f"; {reference.sockets} processors a host"
    times = "" if division.is_alone else f"{division.size} x "
    return profile, times + name, origin, reference.bf16


def _this_machine(ram_bytes: int | None) -> tuple[MachineProfile, str, str]:
    found = kept_examination()
    if found is None:
        raise ConfigError(
            "no machine given. Give --gpu 4090 (or --gpu 24GB, or --gpu none) and --ram 128GB, or "
            "run `megatrain doctor` first"
        )
    profile = found.profile.changed(ram_bytes=ram_bytes or max(1, free_bytes()))
    return profile, profile.name, f"measured {found.when}"


def known() -> str:
    """Return the models and machines that have names here, for people."""
    models = [f"  {model.name:45}{figure(model.published_params):>8}" for model in known_models()]
    machines = [f"  {machine.name:45}{_memory(machine)}" for machine in MACHINES]
    return "\n".join(
        [
            "models, with their parameters",
            *models,
            "",
            "machines for --gpu",
            *machines,
            "",
            "networks for --network",
            *(f"  {each.name:45}{each.bytes_per_s / 1e9:>5.3g} GB/s" for each in NETWORKS),
        ]
    )


def _memory(machine: ReferenceMachine) -> str:
    return "  no card" if machine.on_host else f"{machine.memory_gib:>4} GiB"


def _read(name: str, value: Any, read: Any) -> int:
    try:
        return int(read(value))
    except ValueError as error:
        raise ConfigError(f"--{name} is {str(value)[:60]}; {error}") from None


def _ranges(name: str, value: float | None) -> dict[str, float | None]:
    """Return a time or a price with both ends of its range; None without one."""
    return {name: None} if value is None else {**with_range(name, value, time_range)}


def _row(name: str, value: str) -> str:
    return f"{name:10}{value}"
