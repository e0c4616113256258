"""The model that a person means, as its shape: a known name, a folder, a config.json, or a Hub id.

    name               from the catalog (known_models.py): milliseconds, no network, no torch
    another Hub id     its config.json, from the cache or the Hub
    folder or file     its config.json: the skeleton of the model is built as for training, which
                       takes torch and some seconds

A config.json is untrusted: the strict reader (models/config_json.py) comes first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from megatrain import hub
from megatrain.config import Config
from megatrain.config.sections import LoraSettings
from megatrain.errors import (
    ConfigError,
    HubError,
    MissingPackage,
    ModelConfigError,
    ModelFolderError,
    UnsupportedModel,
)
from megatrain.planning.catalog.known_models import find_known_model, weights_note
from megatrain.planning.model.partly_trained import with_adapters, with_base, with_frozen
from megatrain.planning.model.shapes import ModelShape
from megatrain.planning.model.skeleton import shape_of
from megatrain.quantization import QUANTIZATION_KEY, read_quantization

MAX_JSON_BYTES = 4 << 20


def shape_for(config: Config) -> ModelShape:
    """Return the shape of a config's model, with adapters, frozen params and a teacher.

    Raises as `find_shape` does.
    """
    teacher = config.loss.teacher
    found = _trained_shape(config)
    return found if teacher is None else replace(found, teacher=find_shape(teacher))


def _trained_shape(config: Config) -> ModelShape:
    model, lora = config.model, config.lora
    if lora.path is not None and lora.rank is None:
        raise ConfigError(
            f"lora.path is {lora.path}: an estimate reads no adapters. Give their rank too, like "
            "lora.rank=16; a run compares it with the folder."
        )
    if not model.frozen and lora.rank is None:
        return find_shape(model.name_or_path)
    if (Path(model.name_or_path) / "config.json").is_file():  # then names can be matched exactly
        path = Path(model.name_or_path) / "config.json"
        name = path.parent.resolve().name
        fields = _object(_bytes(path), path)
        quantized = read_quantization(fields.pop(QUANTIZATION_KEY, None))
        data = json.dumps(fields).encode()
        found = _by_skeleton(data, name, model.dtype, model.frozen, lora)
        found = replace(found, published=quantized)
        return found if lora.rank is None else with_base(found, model.base)
    found = find_shape(model.name_or_path)
    if lora.rank is not None:
        return with_base(with_adapters(found, lora), model.base)
    return with_frozen(found, model.frozen) if model.frozen else found


def find_shape(asked: str) -> ModelShape:
    """Return the shape of the model. Raises ConfigError, ModelFolderError or ModelConfigError."""
    path = Path(asked)
    if path.is_dir():
        return _read(path / "config.json", path.resolve().name)
    if path.is_file():
        return _read(path, path.resolve().parent.name)
    try:
        known = find_known_model(asked)
    except ConfigError as unknown:
        return _from_hub(asked, unknown)
    return known.shape


def _from_hub(asked: str, unknown: ConfigError) -> ModelShape:
    """Return the shape of a model on the Hub: its config.json is fetched, and nothing else."""
    if "/" not in asked or not hub.is_id(asked):
        raise unknown
    try:
        folder = hub.find_model(asked, need="config").folder
    except HubError as error:
        raise ConfigError(f"{unknown} {error}") from error
    return _read(folder / "config.json", asked.rpartition("/")[2])


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ModelFolderError(f"{path}: cannot read it: {error.strerror or error}") from error
    if len(data) > MAX_JSON_BYTES:
        raise ModelConfigError(f"{path} is larger than {MAX_JSON_BYTES} bytes, not a config.json")
    return data


def _read(path: Path, name: str) -> ModelShape:
    fields = _object(_bytes(path), path)
    quantized, text, note = fields.pop(QUANTIZATION_KEY, None), fields.get("text_config"), ""
    try:
        shape = _by_skeleton(json.dumps(fields).encode(), name, "bf16", ())
    except (ModelConfigError, UnsupportedModel, MissingPackage):
        if not isinstance(text, Mapping):
            raise
        shape = _by_skeleton(json.dumps(text).encode(), name, "bf16", ())
        note = weights_note("vision")
    if isinstance(quantized, Mapping):
        note = weights_note(str(quantized.get("quant_method", "a quantized form"))[:20].upper())
    try:
        how = read_quantization(quantized)
    except ModelConfigError:  # the note says that it cannot be loaded
        how = None
    return replace(shape, weights=note, published=how)


def _object(data: bytes, path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path}: not valid JSON: {str(error)[:200]}") from error
    if not isinstance(fields, dict):
        raise ModelConfigError(f"{path} is a {type(fields).__name__}, not an object")
    return fields


def _by_skeleton(
    data: bytes,
    name: str,
    dtype: Literal["bf16", "fp32"],
    frozen: tuple[str, ...],
    lora: LoraSettings | None = None,
) -> ModelShape:
    from megatrain.models.adapters.lora import LoraConfig
    from megatrain.models.build import build_decoder
    from megatrain.models.config_json import parse_config

    adapters = None
    if lora is not None and lora.rank is not None:  # its scale is not a size
        adapters = LoraConfig(
            rank=lora.rank,
            alpha=1.0,
            dropout=lora.dropout,
            target_modules=lora.targets,
            target_parameters=lora.experts,
            ranks=tuple(lora.rank_pattern.items()),
            modules_to_save=lora.modules_to_save,
            dora=lora.dora,
            fp32=lora.dtype == "fp32",
        )
    return shape_of(build_decoder(parse_config(data), dtype, frozen, lora=adapters), name)
