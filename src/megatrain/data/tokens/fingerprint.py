"""The name of a prepared data set: a hash of everything that decides its contents.

Files are known by size, time of change, and their first and last MiB: reading all of them at every
start would cost minutes, and a file whose middle changes gets another time. Rows that a program
gives are known by all of their contents (data/rows/in_memory.py). Our own code is known by its
text, so a cache never outlives the code that wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from megatrain.data.rows.source import RowSource

_HEAD_BYTES = 2**20
_CODE = Path(__file__).parents[1]
"""Everything between a file and its tokens: rows, chat templates, tokens."""


def fingerprint(
    source: RowSource, tokenizer: Any, settings: Mapping[str, object], media: str = ""
) -> str:
    """Return 32 hex digits that change with the data, the tokenizer, the settings or the code."""
    digest = xxhash.xxh3_128()
    for path in source.files:
        _add_file(digest, path)
    if source.hub is not None:
        _add(digest, f"{source.hub} {source.hub.commit}")
    if source.given is not None:
        _add(digest, f"{source.given} {source.given.mark()}")
    if source.tokens is not None:
        _add(digest, f"{source.tokens.dtype} {source.tokens.end}")
    _add(digest, f"{source.format!r} {source.bounds}")
    _add_tokenizer(digest, tokenizer)
    _add(digest, json.dumps(settings, sort_keys=True))
    _add(digest, media)
    for module in sorted(_CODE.rglob("*.py")):
        _add(digest, module.read_text())
    return digest.hexdigest()


def _add(digest: xxhash.xxh3_128, text: str) -> None:
    """Add a text and where it ends."""
    digest.update(f"{len(text)}:{text}".encode())


def _add_file(digest: xxhash.xxh3_128, path: Path) -> None:
    stat = path.stat()
    # The name is included because places of bad rows use it.
    _add(digest, f"{path.name} {stat.st_size} {stat.st_mtime_ns}")
    with path.open("rb") as file:
        digest.update(file.read(_HEAD_BYTES))
        file.seek(max(0, stat.st_size - _HEAD_BYTES))
        digest.update(file.read(_HEAD_BYTES))


def _add_tokenizer(digest: xxhash.xxh3_128, tokenizer: Any) -> None:
    import tokenizers
    import transformers

    _add(digest, f"{transformers.__version__} {tokenizers.__version__}")
    _add(digest, tokenizer.backend_tokenizer.to_str())
    _add(digest, json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str))
    _add(digest, json.dumps(tokenizer.chat_template, sort_keys=True))
