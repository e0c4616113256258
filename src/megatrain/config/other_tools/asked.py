"""What a file of another tool asks for: its keys, and what has to be known beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

Tool = Literal["LLaMA-Factory", "Axolotl", "TRL"]
Pairs = Literal["strings", "turns", "none"]
"""What the columns prompt and completion of rows hold; none: there are no such columns."""


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
        pairs_of: Callable[[str], Pairs | None] = lambda _: None,
    ) -> None:
        """`folder` is that of the file. `pairs_of` says what pairs a source has; None: it cannot be
        told."""
        super().__init__(values)
        self.tool, self.folder, self.num_gpus = tool, folder, num_gpus
        self.pairs_of = pairs_of

    def given(self, key: str, otherwise: Any) -> Any:
        """Return a key's value; null is as good as absent."""
        value = self.get(key)
        return otherwise if value is None else value


Converter = Callable[[Any, Asked], tuple[Any, str]]
"""Takes a key's value and all keys; returns ours and a note, or raises Dropped."""
