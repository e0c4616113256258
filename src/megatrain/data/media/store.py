"""The media of a run, by digest: read, decoded and processed whenever they are asked for.

Laws (tests/data/media/test_prepared_media.py)
    1. An item has the tensors that were digested when its row was prepared, or it is a DataError.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatrain.data.media.prepared_media import StoredItem
from megatrain.data.media.processing import MediaProcessor, MediaSettings
from megatrain.data.rows.skipped import BadRow
from megatrain.data.tokens.prepared import PreparedData
from megatrain.errors import DataError
from megatrain.media import MediaItem


class MediaStore:
    """Items of prepared sources. All calls may come from several threads."""

    def __init__(
        self, sources: Iterable[PreparedData], settings: MediaSettings, tokenizer: Any
    ) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self._items: dict[str, tuple[Path, StoredItem]] = {}
        for source in sources:
            for item in source.media_items:
                self._items.setdefault(item.digest, (source.folder, item))
        self._processor: MediaProcessor | None = None
        self._lock = threading.Lock()

    def read(self, digest: str) -> MediaItem:
        """Return an item. Raises DataError."""
        folder, stored = self._items[digest]
        data = stored.read(folder)
        with self._lock:
            try:
                item = self._opened().item(stored.kind, data)
            except BadRow as bad:
                raise _changed(stored, f"{bad.reason}: {bad.detail}") from bad
        if item.digest != digest:
            raise _changed(stored, "its content is another")
        return item

    def _opened(self) -> MediaProcessor:
        if self._processor is None:
            self._processor = MediaProcessor(self._settings, self._tokenizer)
        return self._processor


def _changed(stored: StoredItem, why: str) -> DataError:
    where = stored.path or f"an {stored.kind} of a row"
    return DataError(
        f"{where} has changed since the rows were prepared ({why}). Start the run again: the rows "
        "are then prepared again."
    )
