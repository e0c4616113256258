"""The command `init`: a starter config, or one from another tool's file. Torch is not imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatrain.cli.first_config import require_free
from megatrain.config import load_config
from megatrain.config.aliases import hint, our_key, read_value
from megatrain.config.faults import shown_value
from megatrain.config.load import write_yaml
from megatrain.config.settings import SECTIONS
from megatrain.config.yaml_reader import Document, read_document
from megatrain.errors import ConfigError
from megatrain.files import write_file
from megatrain.text import printable

STARTER = """\
model: Qwen/Qwen3-0.6B  # a Hugging Face Hub id, or a folder
data: {train: train.jsonl, eval: 0.02, max_length: 2048}
train: {epochs: 1, batch_tokens: auto}
optim: {learning_rate: auto, schedule: cosine, warmup: 0.03}
"""


def init_config(target: Path, source: Path | None, *, say: Callable[[str], None] = print) -> None:
    """Write a config, from another tool's file if `source` is one, and say what it has.

    Raises ConfigError if nothing can be written, and also if the file does not load yet.
    """
    require_free(target)
    if source is None:
        write_file(target, STARTER.encode())
        say(f"wrote {target}: set model and data, then `megatrain train {target}`")
        return
    document = read_document(source)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{source}: it has no keys and values. Is it a config?")
    sections, read_as, undecided = bring_over(document)
    text = ["# Keys that are not here have their defaults."]
    for name, values in sections.items():
        text += [f"{name}:", *(f"  {key}: {write_yaml(value)}" for key, value in values.items())]
    if undecided:
        text += ["", "# Yours to decide:", *(f"#   {line}" for line in undecided)]
    write_file(target, ("\n".join(text) + "\n").encode())
    report = [f"the same here ({len(read_as)}):", *(f"  {line}" for line in read_as)]
    report += [f"yours to decide ({len(undecided)}):", *(f"  {line}" for line in undecided)]
    say("\n".join([*report, f"wrote {target}"]))
    try:
        load_config(target)
    except ConfigError as error:
        raise ConfigError(f"{target} was written, and does not load yet:\n{error}") from None


def bring_over(document: Document) -> tuple[dict[str, dict[str, Any]], list[str], list[str]]:
    """Return another tool's file as sections of a config, and a line for each of its keys.

    The first lines are for keys that mean the same here, the others for those that the user has to
    decide: keys that mean something else or nothing here, and values that do not suit our key.
    """
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    read_as, undecided = [], []
    for name, value in document.value.items():
        given = printable(" ".join(f"{name[:64]}: {shown_value(value)}".split()))  # one line
        if (key := our_key((name,))) is None:
            undecided.append(f"{given}  {hint(name) or 'Not known here; see docs/config.md.'}")
            continue
        section, _, leaf = key.partition(".")
        try:
            new = read_value(name, value)
        except ValueError as error:
            undecided.append(f"{given}  {key}: {error}.")
            continue
        if value is None:
            undecided.append(f"{given}  {key} has a default of its own here.")
        elif sections[section].setdefault(leaf, new) != new:
            undecided.append(f"{given}  {key} has the value of another key already.")
        else:
            read_as.append(f"{given}  {key}")
    return {name: values for name, values in sections.items() if values}, read_as, undecided
