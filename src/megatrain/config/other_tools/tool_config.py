"""The settings of another tool's file, and the facts needed to translate them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

Tool = Literal["LLaMA-Factory", "Axolotl", "TRL"]
RowKind = Literal["strings", "turns", "pairs", "kto", "other"]
"""The rows of a source: prompts and completions as strings or as turns, compared answers, marked
answers, or any other."""
Effect = Literal["changes results", "needs you", "same"]
"""The meaning of a line of the report for the run: it differs from that of the tool, the user
decides something, or neither."""


class Differs(str):
    """A note on a run that differs from that of the tool."""

    __slots__ = ()


class Asks(str):
    """A note on something that the user decides."""

    __slots__ = ()


def effect_of(note: str) -> Effect:
    """Return what a note says about the run."""
    if isinstance(note, Differs):
        return "changes results"
    return "needs you" if isinstance(note, Asks) else "same"


class DroppedKey(Exception):
    """No setting here corresponds to this value; the text gives the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        """The text with its effect: a str, Differs or Asks."""


class NoSuchMethod(Exception):
    """A key names a method that MegaTrain does not have, so the file is refused."""

    def __init__(self, key: str, value: Any, reason: str) -> None:
        super().__init__(f"{key} is {value}: {reason}" if key else reason)
        self.key = key


class ToolConfig(dict[str, Any]):
    """The keys of a file and their values."""

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        tool: Tool,
        trainer: str = "",
        folder: Path = Path(),
        num_gpus: int = 1,
        rows_of: Callable[[str], RowKind | None] = lambda _: None,
        num_rows_of: Callable[[str], int | None] = lambda _: None,
        model_type_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        """`folder` contains the file, and `trainer` is TRL's. `rows_of` and `num_rows_of` look into
        a source, and `model_type_of` into a model; they return None for what is unknown."""
        super().__init__(values)
        self.tool, self.trainer, self.folder, self.num_gpus = tool, trainer, folder, num_gpus
        self.rows_of, self.num_rows_of, self.model_type_of = rows_of, num_rows_of, model_type_of

    def given(self, key: str, otherwise: Any) -> Any:
        """Return a key's value; null counts as absent."""
        value = self.get(key)
        return otherwise if value is None else value

    @property
    def num_replicas(self) -> int:
        """The GPUs that compute rows of their own; Axolotl can let several compute one row."""
        context = self.get("context_parallel_size", self.get("sequence_parallel_degree"))
        sizes = [one for one in (context, self.get("tensor_parallel_size")) if type(one) is int]
        return max(self.num_gpus // math.prod(one for one in sizes if one > 0), 1)

    @property
    def model_type(self) -> str | None:
        """The model's type in its config.json, None if it is unknown."""
        name = self.get("model_name_or_path", self.get("base_model"))
        return self.model_type_of(name) if isinstance(name, str) else None


def trl_names(asked: ToolConfig) -> list[str]:
    """Return the sources that a file of TRL names."""
    given = asked.get("datasets")
    items = given if isinstance(given, list) else [{"path": asked.get("dataset_name")}]
    paths = [item.get("path") if isinstance(item, dict) else item for item in items]
    return [path for path in paths if isinstance(path, str)]


Converter = Callable[[Any, ToolConfig], tuple[Any, str]]
"""Takes a key's value and all keys; returns ours and a note, or raises DroppedKey."""
