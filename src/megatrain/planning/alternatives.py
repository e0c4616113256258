"""Alternatives on a machine that a run does not fit: adapters, or a smaller model.

Unlike the changes in fixes.py these are other runs, so each is planned as its own config would be,
and given with its figures.

Law (tests/planning/test_alternatives.py): each alternative, asked for, fits and has these figures.
"""

from __future__ import annotations

import re

from megatrain.config import Config
from megatrain.config.sections import LoraSettings
from megatrain.errors import ConfigError
from megatrain.planning.catalog.known_models import KnownModel, find_known_model, known_models
from megatrain.planning.from_config import (
    fused,
    packs_rows,
    pins_of,
    step_settings_of,
    step_size_of,
    workload_of,
)
from megatrain.planning.machine.profile import MachineProfile
from megatrain.planning.model.partly_trained import with_adapters
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.plan import Plan, make_plan
from megatrain.planning.ranks.division import Division
from megatrain.planning.search import Search

RANK = 16
"""Rank of the adapters that are proposed."""
_SIZE = re.compile(r"(?<![\w.])\d+(\.\d+)?[bm](?![a-z\d])", re.I)
"""The parameters in a model's name: 0.6B, 135M."""


def planned(config: Config, profile: MachineProfile, model: ModelShape, division: Division) -> Plan:
    """Return the plan of a config for a model on a machine."""
    config = fused(config.decided(packing=packs_rows(config, model)), model, profile)
    size = step_size_of(config)
    if size is not None:
        config = config.settled(size.tokens)
    plan = make_plan(
        profile,
        workload_of(config, model, division, unified=profile.on_host),
        step_settings_of(config, unified=profile.on_host, division=division),
        pins_of(config),
    )
    return plan if size is None else plan.with_step_reason(size.reason)


def alternatives(
    config: Config, profile: MachineProfile, model: ModelShape, division: Division
) -> tuple[str, ...]:
    """Return what fits instead, a line each: adapters, then a smaller model of the family."""
    found = []
    if adapted := _adapted(config, model):
        other, shape = adapted
        if could_fit(other, profile, shape, division):
            figures = _figures(planned(other, profile, shape, division))
            found.append(f"lora.rank={RANK} (adapters: {figures})")
    for known in _smaller(config, model):
        shape = known.shape
        if config.lora.rank is not None:
            shape = with_adapters(shape, config.lora)
        if could_fit(config, profile, shape, division):
            figures = _figures(planned(config, profile, shape, division))
            found.append(f"model={known.name} ({figures})")
            break
    return tuple(found)


def _adapted(config: Config, model: ModelShape) -> tuple[Config, ModelShape] | None:
    """Return the run with adapters; None if it has some, or settings that exclude them."""
    excluded = config.model.frozen or config.model.add_tokens or config.lora.path is not None
    if excluded or config.lora.rank is not None or model.is_adapted:
        return None
    lora = LoraSettings(rank=RANK)
    adapted = with_adapters(model, lora)
    if not adapted.is_adapted:  # it has no linear modules
        return None
    return Config.model_validate({**dict(config), "lora": lora}), adapted


def _smaller(config: Config, model: ModelShape) -> list[KnownModel]:
    """Return the known models of the same family that have fewer params, the largest first."""
    if config.model.frozen:  # patterns of another model
        return []
    try:
        name = find_known_model(config.model.name_or_path).name
    except ConfigError:
        return []
    family = _SIZE.sub("", name)
    same = [each for each in known_models() if _SIZE.sub("", each.name) == family != each.name]
    smaller = [each for each in same if each.published_params < 0.9 * model.params]
    return sorted(smaller, key=lambda each: -each.published_params)


def could_fit(
    config: Config, profile: MachineProfile, model: ModelShape, division: Division
) -> bool:
    """Return whether any settings fit: arithmetic alone, no step is simulated."""
    config = fused(config.decided(packing=packs_rows(config, model)), model, profile)
    search = Search(
        profile,
        workload_of(config, model, division, unified=profile.on_host),
        step_settings_of(config, unified=profile.on_host, division=division),
        pins_of(config),
    )
    return search.first_home() is not None


def _figures(plan: Plan) -> str:
    """Return its speed, where the machine is known, and its host memory."""
    host = plan.places()["host"]
    return f"{host}, {plan.speed}" if plan.knows_time else host
