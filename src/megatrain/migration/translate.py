"""Configs of LLaMA-Factory, Axolotl and TRL, translated to ours, with an account of every key.

    result = migrate("sft.yaml")
    result.tool       # "LLaMA-Factory", told by its keys
    result.config     # nested, for Config or to_yaml()
    result.lines      # what became of each key: mapped, changed, default, dropped, unknown

Keys are translated by the tables of config/foreign.py; values that differ in form by the converters
of values.py. What a tool does when a key is absent is written out where we would do
something else, so that the run stays the same.

Laws (tests/migration/test_translate.py): every key of the file has exactly one line;
nothing is taken that is not told; the examples load.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatrain.config.foreign import AXOLOTL, LLAMA_FACTORY, TRL, Rule, prefix_rule
from megatrain.config.load import write_yaml
from megatrain.config.settings import SECTIONS
from megatrain.config.yaml_reader import Document, read_document
from megatrain.errors import ConfigError
from megatrain.migration.values import ALWAYS, CONVERTERS, DEFAULTS, ROWS, Dropped, batch_tokens

Tool = Literal["LLaMA-Factory", "Axolotl", "TRL"]
Outcome = Literal["mapped", "changed", "default", "dropped", "unknown"]

TABLES: dict[Tool, dict[str, Rule]] = {
    "LLaMA-Factory": LLAMA_FACTORY,
    "Axolotl": AXOLOTL,
    "TRL": TRL,
}
_BATCH = ("per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What became of one key."""

    key: str
    outcome: Outcome
    ours: str = ""
    value: Any = None
    """What our key was given."""
    note: str = ""

    def __str__(self) -> str:
        note = f"  ({self.note})" if self.note and self.ours else self.note
        given = f"{self.ours} = {write_yaml(self.value)}" if self.ours else ""
        return f"{self.outcome:8} {self.key:32} {given}{note}".rstrip()


@dataclass(slots=True, kw_only=True)
class Migration:
    """A translated config."""

    tool: Tool
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def put(self, line: Line) -> None:
        """Note a line, and give our key its value."""
        self.lines.append(line)
        if line.ours:
            section, _, key = line.ours.partition(".")
            self.config.setdefault(section, {})[key] = line.value

    def get(self, ours: str, otherwise: Any = None) -> Any:
        """Return what our key was given so far."""
        section, _, key = ours.partition(".")
        return self.config.get(section, {}).get(key, otherwise)

    def to_yaml(self) -> str:
        """Return the translated keys as a config file; what is absent has our default."""
        text = [f"# From {self.tool}. Keys that are not here have their defaults."]
        for section in SECTIONS:
            values = self.config.get(section)
            if not values:
                continue
            text += ["", f"{section}:"]
            text += [f"  {key}: {write_yaml(value)}" for key, value in values.items()]
        return "\n".join(text) + "\n"

    def report(self) -> str:
        """Return every key of the file and what became of it."""
        return "\n".join(map(str, self.lines)) + "\n"


def migrate(path: str | os.PathLike[str], tool: Tool | None = None) -> Migration:
    """Return the translation of a file, YAML or JSON, of `tool` or of the one its keys tell.

    Raises ConfigError if it is no config, or of none of these tools.
    """
    return migrate_document(read_document(path), tool)


def migrate_document(document: Document, tool: Tool | None = None) -> Migration:
    """Return the translation of what a file says."""
    values = document.value
    if not isinstance(values, dict):
        raise ConfigError(f"{document.name}: no keys and values. Is it a config?")
    result = Migration(tool=tool or detect(document))
    rules = TABLES[result.tool]
    for key, value in values.items():
        if key not in _BATCH:
            result.put(_line(key, value, rules, values))
    _put_defaults(result, values)
    _put_batch(result, values)
    _choose_length(result)
    return result


def detect(document: Document) -> Tool:
    """Return the tool whose keys these are: the most of those that no other tool has."""
    keys = set(document.value)
    own = {
        tool: len(keys & set(table) - {key for other in TABLES if other != tool
                                       for key in TABLES[other]})
        for tool, table in TABLES.items()
    }  # fmt: skip
    best = max(own, key=lambda tool: own[tool])
    ties = [tool for tool in own if own[tool] == own[best]]
    if len(ties) > 1:
        raise ConfigError(
            f"{document.name}: cannot tell which tool it is for: {', '.join(TABLES)} have as many "
            "of its keys. Name the tool."
        )
    return best


def _line(key: str, value: Any, rules: Mapping[str, Rule], values: Mapping[str, Any]) -> Line:
    """Return what becomes of one key that needs no other."""
    rule = rules.get(key) or prefix_rule(key)
    if rule is None:
        return Line(
            key=key, outcome="unknown", note="not known here; look for it in docs/config.md"
        )
    if value is None or not rule.to:
        return Line(key=key, outcome="dropped", note=rule.why or "empty")
    convert = CONVERTERS.get(key)
    try:
        new, note = (value, "") if convert is None else convert(value, values)
    except Dropped as reason:
        return Line(key=key, outcome="dropped", note=str(reason))
    outcome: Outcome = "mapped" if new == value and type(new) is type(value) else "changed"
    note = note or rule.why
    return Line(key=key, outcome=outcome, ours=rule.to, value=new, note=note)


def _put_defaults(result: Migration, values: Mapping[str, Any]) -> None:
    """Add what the tool does without a key, unless a key of the file spoke of it."""
    rules = TABLES[result.tool]
    spoken_of = {rules[key].to for key in values if key in rules}
    for key, value in DEFAULTS[result.tool].items():
        ours = rules[key].to
        if ours not in spoken_of:
            new = CONVERTERS[key](value, {key: value})[0] if key in CONVERTERS else value
            note = f"{result.tool} does this when {key} is absent"
            result.put(Line(key=key, outcome="default", ours=ours, value=new, note=note))
    for ours, (value, note) in ALWAYS[result.tool].items():
        result.put(Line(key="-", outcome="default", ours=ours, value=value, note=note))


def _put_batch(result: Migration, values: Mapping[str, Any]) -> None:
    given = [key for key in values if key in _BATCH]
    for key in given or [ROWS[result.tool][0]]:
        if key not in TABLES[result.tool]:
            result.put(Line(key=key, outcome="unknown", note=f"not a key of {result.tool}"))
            continue
        try:
            tokens, note = batch_tokens(result.tool, values, result.get("data.max_length"))
        except Dropped as reason:
            if given:
                result.put(Line(key=key, outcome="dropped", note=str(reason)))
            continue
        outcome: Outcome = "changed" if given else "default"
        ours = "train.batch_tokens"
        result.put(Line(key=key, outcome=outcome, ours=ours, value=tokens, note=note))


def _choose_length(result: Migration) -> None:
    """Keep steps where both steps and epochs are given: so do the tools."""
    if result.get("train.steps") is None or "epochs" not in result.config["train"]:
        return
    del result.config["train"]["epochs"]
    note = "the number of steps is given, and counts"
    result.lines = [
        Line(key=line.key, outcome="dropped", note=note) if line.ours == "train.epochs" else line
        for line in result.lines
        if (line.ours, line.outcome) != ("train.epochs", "default")
    ]
