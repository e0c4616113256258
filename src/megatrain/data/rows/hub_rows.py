"""Rows of a Hugging Face Hub dataset, from one part of it at one commit; or of a file here.

    where = located("openai/gsm8k", name="main", split="test")     # HubRows
    where = located("train.jsonl")                                 # the same path: it is on disk
    where = located("train.jsonl", split="train[:1000]")           # FileRows

`datasets` downloads and reads it: data files only, never dataset scripts. We ask the Hub once,
with a time limit; if it does not answer, the cache of `datasets` is used as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatrain.data.rows.in_memory import GivenRows
from megatrain.data.rows.reading import Raw, data_files, no_such_data, without_filling
from megatrain.data.rows.token_files import TokenFiles
from megatrain.errors import ConfigError, DataError
from megatrain.fetched import local_path, url_of
from megatrain.hub import dataset_commit, is_id

TRAIN = "train"
_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRows:
    """One split of one configuration of a dataset, at one commit."""

    id: str
    name: str | None
    split: str
    commit: str | None
    """None if the Hub does not answer; then it is the commit in the cache."""
    answers: bool
    """Whether the Hub answers."""

    def __str__(self) -> str:
        return " ".join(part for part in (self.id, self.name, self.split) if part)

    def values(self) -> Iterator[Raw]:
        """Yield the rows with their numbers, from 1."""
        # As Arrow has them: `datasets` would decode images here, where nothing limits a decoder.
        number = 0
        for table in _dataset(self).with_format("arrow").iter(batch_size=_BATCH_ROWS):
            for row in table.to_pylist():
                number += 1
                yield number, without_filling(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRows:
    """One split of a file or folder, or a part of it."""

    path: str | Path
    split: str
    """As `datasets` writes it: `train`, `train[:1000]`, `test[10%:20%]`, `train[-100:]`."""

    def __str__(self) -> str:
        return f"{self.path} {self.split}"

    @property
    def name(self) -> str:
        """The split alone."""
        return str(_split_parts(self.split)["name"])

    def bounds(self, count: Callable[[], int]) -> tuple[int, int | None]:
        """Return the first row and the row after the last; None is the end.

        `count` returns the number of rows; it is called for percentages and negative numbers.
        """
        parts = _split_parts(self.split)
        if parts["part"] is None:
            return 0, None
        texts = parts["begin"] or "0", parts["end"]
        total = count() if any(re.search("[-%]", text or "") for text in texts) else 0
        begin, end = (None if text is None else _row_number(text, total) for text in texts)
        return begin or 0, end


_SPLIT = re.compile(
    r"(?P<name>[\w.-]+)(?P<part>\[(?P<begin>-?\d{1,12}%?)?:(?P<end>-?\d{1,12}%?)?\])?", re.ASCII
)


def _split_parts(split: str) -> dict[str, Any]:
    found = _SPLIT.fullmatch(split.replace(" ", ""))
    if found is None:
        raise ConfigError(
            f"split {split}: give a name and perhaps a part, like train, train[:1000] or "
            "train[10%:20%]."
        )
    return found.groupdict()


def _row_number(text: str, total: int) -> int:
    """Return the row that one end of a part names. Percentages are rounded as in `datasets`."""
    number = int(text.rstrip("%"))
    if text.endswith("%"):
        number = round(number * total / 100)
    return min(total, max(0, total + number)) if text.startswith("-") else number


Where = str | Path | HubRows | FileRows | TokenFiles | GivenRows


def located(
    path: str | Path,
    *,
    name: str | None = None,
    split: str | None = None,
    revision: str | None = None,
) -> str | Path | HubRows | FileRows:
    """Return the path if it is on this disk or at a URL, else the dataset of that id.

    Raises DataError if it is neither, HubError if the Hub has no such dataset, ConfigError if a
    configuration or revision of a file is requested.
    """
    path = path if url_of(path) is None else local_path(path)
    asked = {"name": name, "revision": revision}
    if os.path.exists(path):
        if given := [f"{key} {value}" for key, value in asked.items() if value is not None]:
            raise ConfigError(
                f"{path} is a local file, and {' and '.join(given)} only applies to datasets "
                "on the Hub. Remove it, or give another path."
            )
        return path if split is None else FileRows(path=path, split=split)
    data_files(path)  # raises the error that fits a name that is nothing here
    if not is_id(str(path)):
        raise no_such_data(Path(path))
    commit, answers = dataset_commit(str(path), revision)
    rows = HubRows(id=str(path), name=name, split=split or TRAIN, commit=commit, answers=answers)
    return rows if commit else replace(rows, commit=_cached_commit(_dataset(rows)))


@lru_cache(maxsize=8)
def _dataset(rows: HubRows) -> Any:
    """Return the dataset, downloaded to the cache of `datasets`."""
    from datasets import load_dataset

    try:
        if rows.answers:
            return load_dataset(rows.id, rows.name, split=rows.split, revision=rows.commit)
        with _offline():
            dataset = load_dataset(rows.id, rows.name, split=rows.split)
    except Exception as error:  # the failures of datasets have no common base
        raise DataError(_no_rows(rows, error)) from error
    if rows.commit is not None and _cached_commit(dataset) != rows.commit:
        raise DataError(
            f"{rows}: commit {rows.commit[:12]} is requested, the cache has "
            f"{str(_cached_commit(dataset))[:12]}, and the Hub is unreachable"
        )
    return dataset


def _no_rows(rows: HubRows, error: Exception) -> str:
    if not rows.answers and isinstance(error, ConnectionError | FileNotFoundError):
        return (
            f"{rows}: no such file here, not in the cache of datasets, and the Hub is "
            f"unreachable. Run `hf download --repo-type dataset {rows.id}` on a machine with a "
            "network, copy the folder it prints, and give its path."
        )
    text = " ".join(str(error).split())[:400]
    hint = " Set it as `name`." if "Config name is missing" in text else ""
    return f"{rows}: cannot load it from the Hub: {text}{hint}"


def _cached_commit(dataset: Any) -> str | None:
    """Return the commit that names a dataset's folder in the cache of `datasets`."""
    files = dataset.cache_files
    return Path(files[0]["filename"]).parent.name if files else None


@contextmanager
def _offline() -> Iterator[None]:
    """Keep `datasets` from asking a Hub that does not answer."""
    from datasets import config

    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before
