"""Configs of LLaMA-Factory, Axolotl and TRL, translated to ours, with a report on every key.

    result = migrate("sft.yaml")
    result.tool       # "LLaMA-Factory", detected by its keys
    result.config     # nested, for Config or to_yaml()
    result.lines      # one per key: mapped, changed, default, dropped, missing, unknown

Keys are translated by tables.py; values that differ in form by the converters of values.py and
datasets.py. A tool's default for a key that is absent, null or dropped is written out where it
differs from ours, so that the run stays the same. A file of a method that MegaTrain does not have
is refused (methods.py).

Laws (tests/config/other_tools/test_translate.py, test_same_steps.py)
    1. Every key of the file has exactly one line; every setting we derive is reported.
    2. A migrated run has as many steps as the tool would take, for any number of rows; packed runs,
       whose steps depend on how rows fill sequences, say so.
    3. A migrated run has the method, learning rate, schedule and batch that the tool itself reads
       from the file, or the file is refused (tests/config/other_tools/test_configs.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Literal

from megatrain.config.load import write_yaml
from megatrain.config.other_tools.methods import (
    TRAINED,
    asked_loss,
    find_trainer,
    named_trainer,
    require_method,
    uses_adapters,
)
from megatrain.config.other_tools.tables import (
    ACCUMULATION,
    ALWAYS,
    NULL_MEANS,
    REQUIRED,
    ROWS,
    TABLES,
    defaults_of,
    prefix_rule,
)
from megatrain.config.other_tools.tool_config import (
    Asks,
    DroppedKey,
    Effect,
    NoSuchMethod,
    Tool,
    ToolConfig,
    effect_of,
    trl_names,
)
from megatrain.config.other_tools.values import (
    HARMLESS,
    NARROW_ADAMW,
    batch,
    converter,
    counted_in_epochs,
    steps_between,
)
from megatrain.config.settings import SECTIONS
from megatrain.config.yaml_reader import Document, read_document
from megatrain.errors import ConfigError

KeyOutcome = Literal["mapped", "changed", "default", "dropped", "missing", "unknown"]
"""missing: a key that is not in the file, and has no equivalent that could be written."""
_EFFECTS: dict[Effect, str] = {
    "changes results": "Changes results",
    "needs you": "Needs you",
    "same": "Same as there",
}

_BATCH = (*dict.fromkeys(key for key, _ in ROWS.values()), ACCUMULATION)
_CHOOSES_TARGETS = ("lora_target_linear", "lora_target_modules", "lora_model_dir")
_SHORT = {tool.lower().replace("-", ""): tool for tool in TABLES} | {
    "llama_factory": "LLaMA-Factory", "llama-factory": "LLaMA-Factory", "lf": "LLaMA-Factory",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyReport:
    """The translation of one key."""

    key: str
    outcome: KeyOutcome
    ours: str = ""
    value: Any = None
    """The value of our key."""
    note: str = ""

    @property
    def effect(self) -> Effect:
        """The meaning of the line for the run."""
        return effect_of(self.note)

    def __str__(self) -> str:
        note = f"  ({self.note})" if self.note and self.ours else self.note
        given = f"{self.ours} = {write_yaml(self.value)}" if self.ours else ""
        return f"{self.outcome:8} {self.key:32} {given}{note}".rstrip()


@dataclass(slots=True, kw_only=True)
class Migration:
    """A translated config."""

    tool: Tool
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    lines: list[KeyReport] = field(default_factory=list)

    def put(self, line: KeyReport) -> None:
        """Add a line, and set our key to its value."""
        self.lines.append(line)
        if line.ours:
            section, _, key = line.ours.partition(".")
            self.config.setdefault(section, {})[key] = line.value

    def get(self, ours: str, otherwise: Any = None) -> Any:
        """Return the value of our key so far."""
        section, _, key = ours.partition(".")
        return self.config.get(section, {}).get(key, otherwise)

    def to_yaml(self) -> str:
        """Return the translated keys as a config file; absent keys have our defaults."""
        text = [f"# From {self.tool}. Keys that are not here have their defaults."]
        for section in SECTIONS:
            values = self.config.get(section)
            if not values:
                continue
            text += ["", f"{section}:"]
            text += [f"  {key}: {write_yaml(value)}" for key, value in values.items()]
        return "\n".join(text) + "\n"

    def report(self) -> str:
        """Return every key of the file and its translation, the lines that matter most first."""
        parts = []
        for effect, title in _EFFECTS.items():
            lines = [str(line) for line in self.lines if line.effect == effect]
            if lines:
                parts.append("\n".join([f"{title} ({len(lines)}):", *lines]) + "\n")
        return "\n".join(parts)


def migrate(path: str | os.PathLike[str], tool: Tool | None = None, **known: Any) -> Migration:
    """Return the translation of a file, YAML or JSON, of `tool` or of the one its keys suggest.

    `known` are arguments of ToolConfig: other tools count batches per GPU, and `num_gpus` is how
    many they ran on; `trainer` is the word after `trl` in TRL's command. Raises ConfigError if it
    is not a config of one of these tools, or names a method that MegaTrain does not have.
    """
    return migrate_document(read_document(path), tool, folder=FilePath(path).parent, **known)


def migrate_document(document: Document, tool: Tool | None = None, **known: Any) -> Migration:
    """Return the translation of a document; `known` are arguments of ToolConfig."""
    if not isinstance(document.value, dict):
        raise ConfigError(f"{document.name}: it has no keys and values. Is it a config?")
    asked = ToolConfig(document.value, tool=tool or detect_tool(document), **known)
    try:
        if asked.tool == "TRL" and not asked.trainer:
            asked.trainer = find_trainer(asked)
        require_method(asked)
    except NoSuchMethod as error:
        line = document.line((error.key,)) if error.key else 0
        place = f"{document.name}:{line}" if line else document.name
        raise ConfigError(f"{place}: {error}.") from None
    result = Migration(tool=asked.tool)
    for key in asked:
        if key not in _BATCH:
            result.put(_line(key, asked))
    _put_defaults(result, asked)
    _put_loss(result, asked)
    _put_raw_strings(result, asked)
    _put_state(result, asked)
    _put_batch(result, asked)
    _put_cadence(result, asked)
    _put_missing(result, asked)
    _choose_length(result)
    return result


def tool_named(name: str) -> tuple[Tool, str]:
    """Return the tool of a name that a user gave, and TRL's trainer: `trl-dpo`, else empty.

    Raises ConfigError.
    """
    plain = name.lower().replace("_", "-").replace(" ", "-")
    if plain.startswith("trl-") and (trainer := named_trainer(plain.removeprefix("trl-"))):
        return "TRL", trainer
    found = _SHORT.get(name.lower())
    if found is None:
        trainers = ", ".join(f"trl-{trainer}" for trainer in TRAINED)
        raise ConfigError(
            f"{name} is not a supported tool. Give one of: {', '.join(TABLES)}, {trainers}"
        )
    return found, ""


def detect_tool(document: Document) -> Tool:
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
            f"{document.name}: cannot detect its tool: {', '.join(TABLES)} share the same number "
            "of its keys. Name the tool, like `--tool trl`."
        )
    return best


def _line(key: str, asked: ToolConfig) -> KeyReport:
    """Return the translation of one key."""
    value, rule = asked[key], TABLES[asked.tool].get(key) or prefix_rule(key)
    if rule is None:
        return KeyReport(key=key, outcome="unknown", note=Asks("unknown key; see docs/config.md"))
    convert = converter(key, asked)
    if value is None and rule.to:
        _, note = NULL_MEANS.get((asked.tool, key), ((), f"null: {asked.tool}'s default applies"))
        return _dropped(key, note)
    if not rule.to:
        harmless = _is_off(value) or value in HARMLESS.get(key, ())
        return _dropped(key, str(rule.why) if harmless else rule.why)
    try:
        new, note = (value, "") if convert is None else convert(value, asked)
    except DroppedKey as dropped:
        return _dropped(key, dropped.reason)
    outcome: KeyOutcome = "mapped" if new == value and type(new) is type(value) else "changed"
    return KeyReport(key=key, outcome=outcome, ours=rule.to, value=new, note=note or rule.why)


def _dropped(key: str, note: str) -> KeyReport:
    return KeyReport(key=key, outcome="dropped", note=note)


def _is_off(value: Any) -> bool:
    """Return whether a value turns its key off, so that dropping it changes nothing."""
    return value in (None, False, 0, "", "no", "none", "false", [], {})


def _put_defaults(result: Migration, asked: ToolConfig) -> None:
    """Add the tool's defaults, unless a key of the file decided them."""
    decided = {line.ours for line in result.lines} | _left_alone(asked)
    for key, value in defaults_of(asked).items():
        ours = TABLES[asked.tool][key].to
        if ours in decided:
            continue
        convert = converter(key, asked)
        try:
            new, note = (value, "") if convert is None else convert(value, asked)
        except DroppedKey as dropped:  # another key decides, and was reported
            if effect_of(dropped.reason) == "needs you" and key not in asked:
                result.put(_missing(key, dropped.reason))
            continue
        why = (
            f"{asked.tool} does this when {key} is absent"
            if asked.get(key) is None
            else f"{key} is dropped: this is {asked.tool}'s default"
        )
        full = type(note)(f"{why}; {note}") if note else why
        result.put(KeyReport(key=key, outcome="default", ours=ours, value=new, note=full))
    for ours, (value, note) in ALWAYS[asked.tool].items():
        if ours not in decided:
            result.put(KeyReport(key="-", outcome="default", ours=ours, value=value, note=note))


def _missing(key: str, note: str) -> KeyReport:
    return KeyReport(key=key, outcome="missing", note=note)


def _put_loss(result: Migration, asked: ToolConfig) -> None:
    """Add the loss that the trainer or the stage means, where no key names it."""
    loss = asked_loss(asked)
    if loss != "next_token" and result.get("loss.name") is None:
        how = f"the loss of trl {asked.trainer}" if asked.tool == "TRL" else "the loss of the stage"
        result.put(KeyReport(key="-", outcome="default", ours="loss.name", value=loss, note=how))
    if loss == "robust" and result.get("loss.label_smoothing") is None:
        ours, how = "loss.label_smoothing", f"{asked.tool} has none by default"
        result.put(KeyReport(key="-", outcome="default", ours=ours, value=0.0, note=how))


def _put_missing(result: Migration, asked: ToolConfig) -> None:
    """Add what the tool needs and the file lacks."""
    for key, ours in REQUIRED[asked.tool].items():
        wanted = {
            "lora": uses_adapters(asked) and not asked.get("lora_model_dir"),
            "loss": asked_loss(asked) == "simpo",
        }.get(ours.partition(".")[0], True)
        if wanted and asked.get(key) is None:
            note = Asks(f"{asked.tool} does not start without it: set {ours}")
            result.put(_missing(key, note))
    if (
        asked.tool == "Axolotl"
        and uses_adapters(asked)
        and not any(asked.get(key) for key in _CHOOSES_TARGETS)
    ):
        note = Asks(
            "Axolotl does not start without it or lora_target_linear: set lora.targets; without it "
            "all linear modules are adapted"
        )
        result.put(_missing("lora_target_modules", note))


def _put_cadence(result: Migration, asked: ToolConfig) -> None:
    """Count in steps what the file counts in epochs, where the steps of the run are known."""
    if result.get("data.packing"):
        return
    sources, held_out = result.get("data.train", []), result.get("data.eval")
    for place, line in enumerate(result.lines):
        if line.outcome != "dropped" or not (ours := counted_in_epochs(line.key, asked)):
            continue
        steps = steps_between(line.key, asked, sources, held_out)
        if steps is None:
            continue
        result.lines.pop(place)
        note = "from the number of steps"
        changed = KeyReport(key=line.key, outcome="changed", ours=ours, value=steps, note=note)
        result.put(changed)
        result.lines.insert(place, result.lines.pop())


def _put_raw_strings(result: Migration, asked: ToolConfig) -> None:
    """TRL joins string prompts and completions without the chat template."""
    pairs = [asked.rows_of(name) for name in trl_names(asked)]
    if asked.tool == "TRL" and pairs and set(pairs) == {"strings"}:
        ours = "data.chat_template"
        result.config.get("data", {}).pop("chat_template", None)
        result.lines = [
            KeyReport(key=line.key, outcome="dropped", note="TRL applies no template to strings")
            if line.ours == ours
            else line
            for line in result.lines
        ]
        note = "TRL joins string prompts and completions without a template"
        result.put(KeyReport(key="-", outcome="default", ours=ours, value="none", note=note))


def _put_state(result: Migration, asked: ToolConfig) -> None:
    """Keep moments narrow where the name of the tool's optimizer says so."""
    for key in ("optim", "optimizer"):
        name = str(asked.get(key)).lower()
        if key in TABLES[asked.tool] and name in NARROW_ADAMW and not asked.get("use_muon"):
            ours, note = "optim.state", f"{key} is {name}; auto is fp32 wherever that fits"
            value = NARROW_ADAMW[name]
            result.put(KeyReport(key="-", outcome="default", ours=ours, value=value, note=note))


def _left_alone(asked: ToolConfig) -> set[str]:
    """Return our keys for which neither the file nor a default of the tool has a value."""
    return {
        ours
        for (tool, key), (keys, _) in NULL_MEANS.items()
        if tool == asked.tool and key in asked and asked[key] is None
        for ours in keys
    }


def _put_batch(result: Migration, asked: ToolConfig) -> None:
    given = [key for key in asked if key in _BATCH]
    for key in given or [ROWS[asked.tool][0]]:
        if key not in TABLES[asked.tool]:
            note: str = Asks(f"not a key of {asked.tool}")
            result.put(KeyReport(key=key, outcome="unknown", note=note))
            continue
        packed = bool(result.get("data.packing"))
        try:
            ours, value, note = batch(asked, result.get("data.max_length"), packed=packed)
        except DroppedKey as reason:
            if given:
                result.put(_dropped(key, reason.reason))
            continue
        outcome: KeyOutcome = "changed" if given else "default"
        result.put(KeyReport(key=key, outcome=outcome, ours=ours, value=value, note=note))


def _choose_length(result: Migration) -> None:
    """Keep steps where both steps and epochs are given, as the tools do."""
    if result.get("train.steps") is None or "epochs" not in result.config["train"]:
        return
    del result.config["train"]["epochs"]
    note = "overridden by the number of steps"
    result.lines = [
        KeyReport(key=line.key, outcome="dropped", note=note)
        if line.ours == "train.epochs"
        else line
        for line in result.lines
        if (line.ours, line.outcome) != ("train.epochs", "default")
    ]
