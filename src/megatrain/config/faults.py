"""Faults of a config as sentences: place, key, value, and what to give instead."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatrain.config import aliases
from megatrain.config.yaml_reader import Document, Path
from megatrain.errors import ConfigError
from megatrain.places import require_no_secret

_MOST = 20
"""Most faults to report; a file with more is not a config."""
_LONGEST_KEY = 64
Fields = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFault:
    """One thing that is wrong."""

    path: Path
    text: str


def refusal(document: Document, faults: Sequence[ConfigFault], num_faults: int = 0) -> ConfigError:
    """Return the error that lists `faults`, and their total number if more were found."""
    lines = [f"{document.place(fault.path)}: {fault.text}" for fault in faults]
    if num_faults > len(faults):
        lines.append(f"and {num_faults - len(faults)} more")
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError(f"{max(num_faults, len(faults))} errors\n  " + "\n  ".join(lines))


def refuse_secrets(value: object, path: Path = ()) -> None:
    """Raise ConfigError if a value at or below `path` is a URL with a password in it."""
    if isinstance(value, str):
        require_no_secret(value, dotted(path))
    elif isinstance(value, Mapping | BaseModel):
        for name, part in value.items() if isinstance(value, Mapping) else value:
            refuse_secrets(part, (*path, str(name)))
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            refuse_secrets(part, (*path, number))


def faults_of(error: ValidationError, document: Document, fields: Fields) -> list[ConfigFault]:
    """Return the faults that pydantic found, in our words: the first _MOST of the file.

    `fields` are the keys of each mapping.
    """
    found = [(_place(details), details) for details in error.errors(include_url=False)]
    found.sort(key=lambda pair: document.line(pair[0]))  # hints take time: only for reported faults
    return [
        ConfigFault(path=path, text=_text(path, details, document, fields))
        for path, details in found[:_MOST]
    ]


def _place(details: ErrorDetails) -> Path:
    path = details["loc"]
    if path[:2] == ("data", "eval"):
        path = path[:2] + path[3:]  # without the union member that was tried
    return path[:-1] if _lacks_item(details) else path


def _lacks_item(details: ErrorDetails) -> bool:
    return details["type"] == "missing" and isinstance(details["loc"][-1], int)


def dotted(path: Path) -> str:
    """Return a path as it is written in messages and overrides."""
    text = ".".join(map(str, path))
    return text if len(text) <= 200 else f"{text[:200]}..."


def shown_value(value: object) -> str:
    """Return a value as YAML writes it, cut if it is long."""
    if isinstance(value, str):
        text = value or "empty"
    else:
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."


def _text(path: Path, details: ErrorDetails, document: Document, fields: Fields) -> str:
    key, kind = dotted(path), details["type"]
    context, value = details.get("ctx", {}), details["input"]
    if _lacks_item(details):
        kind = "too_short"
    if kind == "extra_forbidden":
        return _second_name(path, value, document) or _unknown(path, fields)
    if kind == "missing":
        return f"{key} is missing{_like(key)}."
    if kind == "value_error":
        return f"{key} is {shown_value(value)}; {context['error']}."
    if kind == "literal_error":
        allowed = context["expected"].replace("'", "")
        told = _KNOWN_VALUES.get((key, str(value).lower())) or _near_value(value, allowed)
        return f"{key} is {shown_value(value)}; give {allowed}.{told}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        keys = ", ".join(fields.get(_mapping(path), ()))
        return (
            f"{key or 'the file'} is {shown_value(value)}; give a mapping with keys from: {keys}."
        )
    wanted = {
        "greater_than": "a number above {gt:g}",
        "greater_than_equal": "{ge:g} or more",
        "less_than": "a number below {lt:g}",
        "less_than_equal": "{le:g} or less",
        "too_short": "two numbers" if path[-1:] == ("betas",) else "at least one",
        "too_long": "two numbers",
        "tuple_type": "a list",
        "bool_type": "true or false",
        "bool_parsing": "true or false",
    }.get(kind, "another value")
    return f"{key} is {shown_value(value)}; give {wanted.format(**context)}."


def _like(key: str) -> str:
    examples = {
        "model": "model: Qwen/Qwen3-8B",
        "model.name_or_path": "name_or_path: Qwen/Qwen3-8B",
        "data": "data: {train: train.jsonl}",
        "data.train": "train: train.jsonl",
    }
    return f". Give one, like `{examples[key]}`" if key in examples else ""


def _mapping(path: Path) -> str:
    """Return the name in `fields` of the mapping at `path`: positions in a list do not count."""
    return ".".join(part for part in path if isinstance(part, str))


def _second_name(path: Path, value: object, document: Document) -> str:
    """Return what is wrong with an alias that is left: its value, or that its key has another one.

    Empty: it is none, or nothing is wrong but the name.
    """
    if (key := aliases.our_key(path)) is None:
        return ""
    try:
        aliases.read_value(str(path[-1]), value)
    except ValueError as error:
        return f"{dotted(path)} is {shown_value(value)}; {error}."
    section, _, leaf = key.partition(".")
    given = document.value.get(section) if isinstance(document.value, dict) else None
    if not isinstance(given, dict) or leaf not in given:
        return ""
    return (
        f"{dotted(path)} is {shown_value(value)}, and {key}, which is the same, is "
        f"{shown_value(given[leaf])} ({document.place((section, leaf))}). Remove one of the two."
    )


def _unknown(path: Path, fields: Fields) -> str:
    """Return the message for an unknown key: its name here, or a similar key."""
    key, home = str(path[-1]), _mapping(path[:-1])
    unknown = f"unknown key {dotted(path)}."
    if len(key) > _LONGEST_KEY:
        return unknown
    siblings = list(fields.get(home, ()))
    hint = aliases.hint(key)
    if hint and not home:
        return f"{unknown} {hint}"
    near = [name for name in siblings if name.startswith(f"{key}_")]
    near = near or difflib.get_close_matches(key, siblings, n=1, cutoff=0.75)
    if near:
        return f"{unknown} Did you mean {dotted((*path[:-1], near[0]))}?"
    if hint := hint or aliases.near_hint(key):
        return f"{unknown} {hint}"
    places = {
        field: f"{section}.{field}"
        for section, names in reversed(list(fields.items()))
        if section and "." not in section
        for field in names
    }
    near = difflib.get_close_matches(key, [*places, *fields[""]], n=1, cutoff=0.75)
    if near:
        return f"{unknown} Did you mean {places.get(near[0], near[0])}?"
    return f"{unknown} Known here: {', '.join(siblings)}."


_REWARDS = " Training on rewards is `loss: grpo` with `rollouts`: docs/rewards.md."
_NO_FLEX = (
    " flex_attention cannot be trained with: torch has no backward for it on a CPU, and compiles "
    "its masks again for each shape. With auto, documents of packed rows are attended to alone."
)
_KNOWN_VALUES = {
    ("model.attn", "flex_attention"): _NO_FLEX,
    **{("loss.name", name): _REWARDS for name in ("ppo", "rloo", "reinforce")},
}
"""Values that people bring from elsewhere, and what to do here."""


def _near_value(value: object, allowed: str) -> str:
    words = allowed.replace(" or ", ", ").split(", ")
    near = difflib.get_close_matches(str(value)[:_LONGEST_KEY], words, n=1)
    return f" Did you mean {near[0]}?" if near else ""
