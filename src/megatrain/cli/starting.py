"""The command `init`: a first config, or one brought from another tool. Torch is not imported."""

from __future__ import annotations

from pathlib import Path

from megatrain.config import load_config
from megatrain.config.other_tools.asked import Pairs
from megatrain.config.other_tools.translate import migrate, tool_named
from megatrain.data.rows.reading import parsed
from megatrain.data.rows.source import open_source
from megatrain.errors import ConfigError, MegaTrainError
from megatrain.files import write_file

STARTER = """\
model: Qwen/Qwen3-0.6B  # a Hugging Face Hub id, or a folder
data: {train: train.jsonl, eval: 0.02, max_length: 2048}
train: {epochs: 1, batch_tokens: auto}
optim: {learning_rate: auto, schedule: cosine, warmup: 0.03}
"""


def init_config(
    target: Path, source: Path | None, *, tool: str | None = None, num_gpus: int = 1
) -> str:
    """Write a config; return a summary."""
    if target.exists():
        raise ConfigError(f"{target} exists. Give another name.")
    if source is None:
        write_file(target, STARTER.encode())
        return f"wrote {target}: set model and data, then `megatrain train {target}`"
    named = None if tool is None else tool_named(tool)
    migration = migrate(source, named, num_gpus=num_gpus, pairs_of=_pairs_of)
    write_file(target, migration.to_yaml().encode())
    summary = f"{migration.report()}\nwrote {target}"
    try:
        load_config(target)
    except ConfigError as error:
        summary += f", which does not load yet:\n{error}"
    return summary


def _pairs_of(source: str) -> Pairs | None:
    """Return the types of prompt and completion in a local file, None if unknown."""
    if not Path(source).exists():
        return None
    try:
        opened = open_source(source)
        if opened.format.columns != ("prompt", "completion"):
            return "none"
        row = parsed(next(iter(opened.values()))[1])
    except (MegaTrainError, StopIteration):
        return None
    is_text = isinstance(row, dict) and isinstance(row.get("prompt"), str)
    return "strings" if is_text else "turns"
