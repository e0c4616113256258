"""The settings of another tool's file, and the facts needed to translate them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

Tool = Literal["LLaMA-Factory", "Axolotl", "TRL"]
Pairs = Literal["strings", "turns", "none"]
"""The contents of the columns prompt and completion; none if there are no such columns."""


class DroppedKey(Exception):
    """No setting here corresponds to this value; the text gives the reason."""


class ToolConfig(dict[str, Any]):
    """The keys of a file and their values."""

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        tool: Tool,
        folder: Path = Path(),
        num_gpus: int = 1,
        pairs_of: Callable[[str], Pairs | None] = lambda _: None,
    ) -> None:
        """`folder` contains the file. `pairs_of` returns the kind of pairs in a source, None if it
        is unknown."""
        super().__init__(values)
        self.tool, self.folder, self.num_gpus = tool, folder, num_gpus
        self.pairs_of = pairs_of

    def given(self, key: str, otherwise: Any) -> Any:
        """Return a key's value; null counts as absent."""
        value = self.get(key)
        return otherwise if value is None else value


Converter = Callable[[Any, ToolConfig], tuple[Any, str]]
"""Takes a key's value and all keys; returns ours and a note, or raises Dropped."""
