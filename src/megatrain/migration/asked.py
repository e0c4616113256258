"""What a file of another tool asks for: its keys, and what has to be known beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

Tool = Literal["LLaMA-Factory", "Axolotl", "TRL"]


class Dropped(Exception):
    """There is nothing of ours that this value could become; the text says why."""


class Asked(dict[str, Any]):
    """The keys of a file and their values."""

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        tool: Tool,
        folder: Path = Path(),
        num_gpus: int = 1,
        has_pairs: Callable[[str], bool | None] = lambda _: None,
    ) -> None:
        """`folder` is that of the file. `has_pairs` says of a source whether its rows have the
        columns prompt and completion; None: it cannot be told."""
        super().__init__(values)
        self.tool, self.folder, self.num_gpus = tool, folder, num_gpus
        self.has_pairs = has_pairs

    def given(self, key: str, otherwise: Any) -> Any:
        """Return a key's value; null is as good as absent."""
        value = self.get(key)
        return otherwise if value is None else value


Converter = Callable[[Any, Asked], tuple[Any, str]]
"""Takes a key's value and all keys; returns ours and a note, or raises Dropped."""
