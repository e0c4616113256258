"""Config files in and out: YAML with overrides to a Config, and back.

    config = load_config("run.yaml", ["train.epochs=2", "data.train=[a.jsonl, b.jsonl]"])

An override is `key=value`, its value read as YAML; it replaces the file's value. A section in short
form, like `model=NAME`, is the one key of it that the word sets: the rest stays. Names of other
tools that mean a key of ours are read as that key (aliases.py).

Laws (tests/config/test_load.py)
    1. Round trip: the output of dump_config loads as an equal Config, and dumps as the same text.
    2. One ConfigError reports every fault, with file, line (or override) and key.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path as File
from typing import Any

from megatrain.config.aliases import read_alias, with_our_keys
from megatrain.config.faults import ConfigFault, dotted, refusal, refuse_secrets, shown_value
from megatrain.config.quantities import write_bytes
from megatrain.config.sections import Section
from megatrain.config.settings import SHORT_FORMS, Config
from megatrain.config.yaml_reader import Document, Path, parse_document, read_document
from megatrain.errors import ConfigError, Notice


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Return the settings of a file, changed by `overrides`.

    Raises ConfigError with every fault, DiskError if the system fails to read the file.
    """
    return resolve_config(read_document(path), overrides)


def resolve_config(document: Document, overrides: Sequence[str] = ()) -> Config:
    """Return the settings of a document, changed by `overrides`."""
    if not isinstance(document.value, dict | None):
        text = (
            f"the file is {shown_value(document.value)}; give keys and values, like `model: NAME`."
        )
        raise refusal(document, [ConfigFault(path=(), text=text)])
    refuse_secrets(document.value)
    value = _written_out(document.value or {})
    document, read_as = with_our_keys(replace(document, value=value))
    value, origins = document.value, dict(document.origins)
    by_alias: dict[Path, tuple[str, Any]] = {}
    for override in overrides:
        path, new = _parse_override(override)
        refuse_secrets(new, path)
        origin = f"override {override:.100}"
        if (key := _short_key(path[0], new)) is not None and len(path) == 1:
            path = (path[0], key)  # the rest of the section stays
        ours, new = read_alias(path, new)
        name, other = by_alias.setdefault(ours, (dotted(path), new))
        if name != dotted(path) and other != new:
            raise ConfigError(
                f"{origin}: {name}, which is the same, is {shown_value(other)}. Remove one of the "
                "two."
            )
        if ours != path:
            read_as[dotted(path)] = dotted(ours)
        origins[ours] = origin
        _put(value, ours, new, origin)
    if read_as:
        text = ", ".join(f"{name} as {key}" for name, key in read_as.items())
        warnings.warn(f"read {text}", Notice, stacklevel=2)
    return Config.model_validate(value, context=replace(document, origins=origins))


def _written_out(value: dict[str, Any]) -> dict[str, Any]:
    """Return a copy in which sections in short form are mappings, so overrides find them."""
    value = copy.deepcopy(value)
    for section, given in value.items():
        if (key := _short_key(section, given)) is not None:
            value[section] = {key: given}
    return value


def _short_key(section: object, given: object) -> str | None:
    """Return the key that a section in short form sets; None: it is not in short form."""
    return SHORT_FORMS.get(str(section)) if isinstance(given, str) else None


def _parse_override(override: str) -> tuple[Path, Any]:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) > 8:
        raise ConfigError(f"override {override:.100}: give key=value, like train.epochs=2.")
    path = tuple(int(part) if part.isdecimal() and len(part) < 6 else part for part in parts)
    data = text.encode("utf-8", "surrogatepass")  # a shell passes on bytes that are not text
    return path, parse_document(data, f"override {override:.100}").value


def _put(value: Any, path: Path, new: Any, origin: str) -> None:
    """Set `new` at `path`, creating mappings as needed."""
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(value, dict):
            key = str(part)
            if last:
                value[key] = new
            elif value.get(key) is None:
                value[key] = {}
            value = value[key]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            if last:
                value[part] = new
            value = value[part]
        else:
            around = dotted(path[:depth])
            raise ConfigError(
                f"{origin}: {around} is {shown_value(value)}, which has no {part}. "
                f"Give all of {around}."
            )


CONFIG_NAME = "config.yaml"
USED_NAME = "config.used.yaml"
"""Beside a config.yaml that somebody has edited."""


def file_of_run(run: File) -> File:
    """Return the file with the settings that a run has used last, whether it is there or not."""
    used = run / USED_NAME
    return used if used.exists() else run / CONFIG_NAME


def dump_config(config: Config) -> str:
    """Return every setting as YAML, in the order of the reference, with its description."""
    lines = ["# Every setting of this run. megatrain train reads this file."]
    for section, settings in config:
        lines += ["", f"{section}:"]
        for key, field in type(settings).model_fields.items():
            value = getattr(settings, key)
            if key in ("vram", "ram") and isinstance(value, int):
                value = write_bytes(value)
            lines += [f"  # {field.description}", f"  {key}: {write_yaml(value)}"]
    return "\n".join(lines) + "\n"


def write_yaml(value: object) -> str:
    """Return a value as YAML on one line; JSON is YAML, so text needs no special rules."""
    if isinstance(value, Section | dict):
        pairs = value.items() if isinstance(value, dict) else value
        parts = (f"{write_yaml(name)}: {write_yaml(part)}" for name, part in pairs)
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(write_yaml, value))}]"
    if isinstance(value, str) and value.isascii() and value.isidentifier() and not _is_word(value):
        return value
    text = json.dumps(value)
    if isinstance(value, float) and "." not in text:
        return text.replace("e", ".0e")  # YAML 1.1 reads 1e-05 as text
    return text


def _is_word(text: str) -> bool:
    """Return whether YAML, in any of its versions, reads this text as something else."""
    return text.lower() in ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
