"""Whether rows of a config are read in chunks: token files, and large files of rows."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from megatrain.config import Config
from megatrain.config.sections import DataSource
from megatrain.data.rows.reading import data_files
from megatrain.errors import ConfigError
from megatrain.fetched import url_of
from megatrain.places import open_place

TOKEN_FILES = (".bin", ".npy")
LINES = (".jsonl", ".ndjson", ".txt")
IN_CHUNKS = (*LINES, ".parquet")
"""Files whose rows can be tokenized while a run goes on."""
LARGE_BYTES = 2**30
"""Files of more are tokenized while a run of train.steps goes on, unless data.prepare says it."""


def is_token_path(path: str) -> bool:
    """Return whether a path or URL names token files, or a folder of them."""
    if Path(path).suffix.lower() in TOKEN_FILES:
        return True
    url = url_of(path)
    if url is not None and not url.startswith("file://"):
        return not Path(path).suffix and _holds_tokens(url)
    folder = Path(str(path).removeprefix("file://"))
    if not folder.is_dir():
        return False
    suffixes = {one.suffix.lower() for one in folder.iterdir() if not one.name.startswith(".")}
    return bool(suffixes & set(TOKEN_FILES)) and suffixes <= {*TOKEN_FILES, ".idx", ".json", ".md"}


@lru_cache
def _holds_tokens(url: str) -> bool:
    """Return whether there are token files below a URL."""
    return any(one.key.endswith(TOKEN_FILES) for one in open_place(url).listed())


def is_chunked(config: Config) -> bool:
    """Return whether a source of the config is read in chunks. Raises ConfigError."""
    found = any(is_token_path(one.path) or is_during(config, one) for one in config.data.train)
    if config.data.prepare == "during" and not found:
        raise ConfigError(
            f"data.prepare is during, and {config.data.train[0].path} cannot be tokenized while "
            "the run goes on: that needs train.steps and train.batch_tokens, loss.name next_token, "
            f"and whole {', '.join(IN_CHUNKS)} files. Set it to first."
        )
    return found


def is_during(config: Config, source: DataSource) -> bool:
    """Return whether rows of a source are tokenized while the run goes on."""
    data, train, loss = config.data, config.train, config.loss
    is_whole = source.rows is None and source.split is None
    if data.prepare == "first" or train.steps is None or train.batch_rows is not None:
        return False
    if not is_whole or loss.preferences or loss.teacher or loss.draws:
        return False
    url = url_of(source.path)
    if (url is not None and not url.startswith("file://")) or not Path(source.path).exists():
        return False
    files = data_files(source.path)
    if any(path.suffix.lower() not in IN_CHUNKS for path in files):
        return False
    size = sum(path.stat().st_size for path in files)
    return data.prepare == "during" or size > LARGE_BYTES
