"""Rotary positions of a model: how many it declares, and its config.json with more of them.

A model declares a type of scaling and its factor, or none. `with_rope` replaces both in config.json
itself, so that the model that is trained, its checkpoints and its export agree, and transformers,
vLLM and SGLang read the same positions from them:

    yarn, llama3, default   max_position_embeddings has the scaled number
    linear                  it has the number before scaling, which readers multiply by the factor

Where layers have parameters by kind (gemma3, olmo3), max_position_embeddings always has the scaled
number, and layers with a sliding window keep theirs: no position there is beyond the window.

Laws (tests/models/test_rope.py)
    1. Logits equal those of transformers with the same rope parameters, bitwise.
    2. The new config.json declares what was asked for, or a ConfigError is raised.
    3. The line that an error suggests covers the rows that caused it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from megatrain.errors import ConfigError, ModelConfigError, listing
from megatrain.models.config_json import parse_config, read_object
from megatrain.models.multimodal import text_part

ORIGINAL = "original_max_position_embeddings"
_UNSCALED = ("default", "dynamic")
"""dynamic stretches rows at inference alone: the model was trained without."""
_FLAT = ""
"""The kind of layers in a model whose layers share their parameters."""
_LIMIT = "max_position_embeddings"
_APART = ("rope_theta", "partial_rotary_factor")
"""Parameters that scale nothing: before transformers 5 they were beside rope_scaling."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Parameters of every Llama that has this type."""


def num_positions(config: Any) -> int | None:
    """Return how many positions a model is made for, stretched ones included; None: no limit."""
    most = getattr(config, _LIMIT, None)
    if not isinstance(most, int) or most < 1:
        return None
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(scaling, dict):
        return most
    by_kind = [one for one in scaling.values() if isinstance(one, dict)]
    # By kind of layer, factors without an original length are already in the number of positions.
    return max([most, _stretched(scaling, most), *(_stretched(one, 0) for one in by_kind)])


def _stretched(scaling: Mapping[str, Any], most: int) -> int:
    """Return the reach of rotary positions that are scaled, from that of the original model."""
    factor = scaling.get("factor")
    original = scaling.get(ORIGINAL) or most
    if not isinstance(factor, int | float) or not isinstance(original, int | float):
        return 0
    return int(original * factor)


def line_for(config: PreTrainedConfig, length: int) -> str | None:
    """Return the line of a run's config that makes the model reach `length`; None if none does."""
    data = config.to_json_string().encode()
    try:
        declared, most = _declared(config), _positions(config)
        kind = next(iter(declared.values()))["rope_type"]
        kind = "yarn" if kind in _UNSCALED else kind
        factor = float(math.ceil(_factor(declared) * length / most))
        with_rope(data, {"rope_type": kind, "factor": factor})
    except (ConfigError, ModelConfigError):
        return None
    return f"model.rope: {{type: {kind}, factor: {factor}}}"


def with_rope(config_json: bytes, wanted: Mapping[str, Any]) -> bytes:
    """Return config.json with the rotary positions that are `wanted`, by transformers' names.

    Raises ConfigError if the model has none, or declares others that they would contradict.
    """
    config = parse_config(config_json)
    declared, most = _declared(config), _positions(config)
    original = _original(config, declared, wanted)
    before = wanted.get(ORIGINAL) if _factor(declared) == 1 else None
    before = before or most / _factor(declared)
    positions = int(before * wanted["factor"])
    if positions < most:
        raise ConfigError(
            f"model.rope declares {positions:,} positions, but the model has {most:,}. Raise "
            "model.rope.factor."
        )
    stays = wanted["rope_type"] == "linear" and _FLAT in declared
    limit = int(before) if stays else positions
    parameters = {kind: _parameters(own, wanted, original, limit) for kind, own in declared.items()}
    fields = read_object(config_json)
    fields.pop(_LIMIT, None)
    fields[config.attribute_map.get(_LIMIT, _LIMIT)] = limit
    if hasattr(config, ORIGINAL):  # transformers prefers it to the one among the parameters
        fields[ORIGINAL] = original
    _put(fields, config, parameters)
    result = json.dumps(fields, indent=2).encode() + b"\n"
    _verify(result, parameters, positions)
    return result


def require_rotary(model: nn.Module) -> None:
    """Raise ConfigError if a model whose config was scaled never looks at the frequencies."""
    if not any("inv_freq" in name for name, _ in model.named_buffers()):
        raise ConfigError(
            "model.rope scales rotary positions, but this model computes none, whatever its "
            "config.json says. Remove model.rope."
        )


def _declared(config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Return the parameters of layers that see the whole row, by kind. Raises ConfigError."""
    name, parameters = config.model_type, getattr(config, "rope_parameters", None)
    if text_part(config) is not config:
        raise ConfigError(
            f"model.rope: {name} is a joint model. Scale the positions in text_config of its "
            "config.json, and remove model.rope."
        )
    if not parameters or getattr(config, "alibi", False) is True:
        raise ConfigError(
            f"model.rope scales rotary positions, but this {name} has none that its config.json "
            "describes. Remove model.rope."
        )
    kinds = config.nested_rope_parameter_keys(parameters)
    if not kinds:
        return {_FLAT: dict(parameters)}
    found = {kind: parameters[kind] for kind in kinds if "sliding" not in kind}
    found = {kind: dict(own) for kind, own in found.items() if own is not None}
    if not found:
        raise ConfigError(
            f"model.rope: in this {name} only layers with a sliding window have rotary positions, "
            "and none is beyond the window. Remove model.rope."
        )
    return found


def _positions(config: PreTrainedConfig) -> int:
    most = num_positions(config)
    if most is None:
        raise ConfigError(
            f"model.rope: this {config.model_type} declares no number of positions ({_LIMIT} of "
            "config.json), so there is nothing to scale. Remove model.rope."
        )
    return most


def _factor(declared: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the factor of a model; 1 if it has none. Raises ConfigError if it has several."""
    kinds = {own["rope_type"] for own in declared.values()}
    if kinds <= set(_UNSCALED):
        return 1.0
    factors = {own.get("factor") for own in declared.values()}
    factor = factors.pop()
    if factors or len(kinds) > 1 or not isinstance(factor, int | float) or factor < 1:
        raise ConfigError(
            f"model.rope: the model has rotary positions of type {listing(kinds)}, fitted to it, "
            "which one factor cannot scale. Remove model.rope."
        )
    return float(factor)


def _original(
    config: PreTrainedConfig, declared: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Any]
) -> int:
    """Return the positions before scaling. Raises ConfigError if the model declares others."""
    factor, most = _factor(declared), _positions(config)
    own = next(iter(declared.values()))
    kind = own["rope_type"]
    known = None if kind in _UNSCALED else own.get(ORIGINAL)
    if kind not in _UNSCALED and wanted["rope_type"] != kind:
        raise ConfigError(
            f"model.rope.type is {wanted['rope_type']}, but the model was trained with {kind} and "
            f"factor {factor:g}: another type changes every position that it knows. Give type "
            f"{kind} and a factor above {factor:g}."
        )
    given = wanted.get(ORIGINAL)
    if given is not None and (given > most or (known is not None and given != known)):
        declares = f"{most:,} positions" if known is None else f"{known:,}"
        raise ConfigError(
            f"model.rope.{ORIGINAL} is {given:,}, but this {config.model_type} declares "
            f"{declares}. Remove the key."
        )
    return int(given or known or most / factor)


def _parameters(
    declared: Mapping[str, Any], wanted: Mapping[str, Any], original: int, limit: int
) -> dict[str, Any]:
    """Return the new parameters: as declared, but for what is wanted."""
    kept = {key: value for key, value in declared.items() if key != "type"}
    if declared["rope_type"] != wanted["rope_type"]:
        kept = {key: kept[key] for key in _APART if key in kept}
        kept |= _LLAMA3 if wanted["rope_type"] == "llama3" else {}
    new = {**kept, **wanted}
    new.pop(ORIGINAL, None)
    if new["rope_type"] == "default":
        del new["factor"]
    elif new["rope_type"] != "linear":
        new[ORIGINAL] = original
    return new | ({_LIMIT: limit} if _LIMIT in kept else {})


def _put(
    fields: dict[str, Any], config: PreTrainedConfig, parameters: dict[str, dict[str, Any]]
) -> None:
    """Write the parameters as this config.json has them: since transformers 5 in one mapping."""
    if fields.get("rope_parameters"):
        flat = parameters.get(_FLAT)
        fields["rope_parameters"] = flat or {**config.rope_parameters, **parameters}
        fields.pop("rope_scaling", None)
        return
    new = next(iter(parameters.values()))
    scaling = {key: value for key, value in new.items() if key not in _APART}
    fields["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    fields["rope_theta"] = new["rope_theta"]


def _verify(config_json: bytes, parameters: dict[str, dict[str, Any]], positions: int) -> None:
    """Raise ConfigError unless transformers reads the parameters and positions that were put in."""
    try:
        config = parse_config(config_json)
    except ModelConfigError as error:
        raise ConfigError(f"model.rope: the family does not accept it. {error}") from error
    read, most = _declared(config), num_positions(config)
    same = all(read.get(kind, {}).items() >= new.items() for kind, new in parameters.items())
    if most != positions or not same:
        raise ConfigError(
            f"model.rope: transformers reads {read} and {most} positions from a "
            f"{config.model_type} with {parameters} and {positions}. Its family scales positions "
            "otherwise: change the model's config.json instead, and remove model.rope."
        )
