"""The command `init`: a first config, or one brought from another tool. Torch is not imported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from megatrain import hub
from megatrain.cli.first_config import require_free
from megatrain.config import load_config
from megatrain.config.other_tools.tool_config import RowKind
from megatrain.config.other_tools.translate import migrate, tool_named
from megatrain.data.rows.reading import data_files, parsed, read_unparsed
from megatrain.data.rows.source import open_source
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.files import write_file
from megatrain.planning.catalog.asked_models import MAX_JSON_BYTES
from megatrain.planning.catalog.known_models import find_known_model

STARTER = """\
model: Qwen/Qwen3-0.6B  # a Hugging Face Hub id, or a folder
data: {train: train.jsonl, eval: 0.02, max_length: 2048}
train: {epochs: 1, batch_tokens: auto}
optim: {learning_rate: auto, schedule: cosine, warmup: 0.03}
"""


def init_config(
    target: Path,
    source: Path | None,
    *,
    tool: str | None = None,
    num_gpus: int = 1,
    say: Callable[[str], None] = print,
) -> None:
    """Write a config, and say what it has.

    Raises ConfigError if nothing can be written, and also if the file does not load yet.
    """
    require_free(target)
    if source is None:
        write_file(target, STARTER.encode())
        say(f"wrote {target}: set model and data, then `megatrain train {target}`")
        return
    named, trainer = (None, "") if tool is None else tool_named(tool)
    migration = migrate(
        source,
        named,
        trainer=trainer,
        num_gpus=num_gpus,
        rows_of=_rows_of,
        num_rows_of=_num_rows_of,
        model_type_of=_model_type_of,
    )
    write_file(target, migration.to_yaml().encode())
    say(f"{migration.report()}\nwrote {target}")
    try:
        load_config(target)
    except ConfigError as error:
        raise ConfigError(f"{target} was written, and does not load yet:\n{error}") from None


def _rows_of(source: str) -> RowKind | None:
    """Return the kind of rows in a local file, None if it is unknown."""
    if not Path(source).exists():
        return None
    try:
        opened = open_source(source)
        if opened.format.preferences is not None:
            return opened.format.preferences
        if opened.format.columns != ("prompt", "completion"):
            return "other"
        row = parsed(next(iter(opened.values()))[1])
    except (MegaTrainError, StopIteration):
        return None
    if not isinstance(row, dict) or isinstance(row.get("label"), bool):
        return None  # a label may be a mark of kto, or any other column
    return "strings" if isinstance(row.get("prompt"), str) else "turns"


def _num_rows_of(source: str) -> int | None:
    """Return the number of rows of a local file or folder, None if it is unknown."""
    if not Path(source).exists():
        return None
    try:
        return sum(1 for path in data_files(source) for _ in read_unparsed(path))
    except MegaTrainError:
        return None


def _model_type_of(name: str) -> str | None:
    """Return the type of a model: by its folder, the cache of the Hub, or the known names."""
    folder = hub.cached_model(name)
    if folder is not None:
        try:
            found = json.loads((folder / "config.json").read_bytes()[:MAX_JSON_BYTES])
        except (OSError, ValueError, RecursionError):
            return None
        kind = found.get("model_type") if isinstance(found, dict) else None
        return kind if isinstance(kind, str) else None
    try:
        return find_known_model(name).shape.family
    except ConfigError:
        return None
