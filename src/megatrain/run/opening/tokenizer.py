"""The tokenizer of a run; new special tokens go from it into the data, the model and exports."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain.config import Config
from megatrain.disk.hf.growth import Growth
from megatrain.errors import ConfigError, ModelFolderError
from megatrain.model_files import CARRIED, VOCABULARY, is_lfs_pointer, lfs_pointer_text
from megatrain.run.opening.resumption import OpenedCheckpoint


def open_tokenizer(
    config: Config, source: Path, notes: list[str], found: OpenedCheckpoint | None
) -> tuple[Any, Growth | None]:
    """Return the tokenizer of a run, and the tokens that its model does not have yet."""
    tokenizer = load_tokenizer(source)
    if found is not None:  # its model and tokenizer have them
        return tokenizer, None
    growth, more = add_tokens(tokenizer, config.model.add_tokens)
    notes += more
    return tokenizer, growth


def load_tokenizer(folder: str | Path) -> Any:
    """Return the tokenizer of a model folder. Raises ModelFolderError, whatever goes wrong."""
    from transformers import AutoTokenizer

    if not Path(folder).is_dir():
        raise ModelFolderError(f"{folder} is not a directory. Give the folder of a model.")
    _require_vocabulary(Path(folder))
    try:
        return AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raise some that are not an Exception
        raise ModelFolderError(
            f"{folder}: cannot read its tokenizer: {type(error).__name__}: {str(error)[:300]}"
        ) from error


def _require_vocabulary(folder: Path) -> None:
    """Raise ModelFolderError where transformers would make up an empty tokenizer."""
    files = [path for path in sorted(folder.iterdir()) if VOCABULARY.fullmatch(path.name)]
    if not files:
        raise ModelFolderError(
            f"{folder} has no tokenizer.json, tokenizer.model or vocabulary. Copy the "
            "tokenizer files of the model to it."
        )
    for path in files:
        if path.is_file() and is_lfs_pointer(path):
            raise ModelFolderError(lfs_pointer_text(path))


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> tuple[Growth | None, list[str]]:
    """Add tokens to the tokenizer; return the growth of the model, and notes.

    None: it has all of them already. Raises ConfigError for one that cannot be a token.
    """
    known = {token: number for token, number in tokenizer.get_vocab().items() if token in tokens}
    notes = [f"model.add_tokens: {t} already is token {n}" for t, n in sorted(known.items())]
    num_tokens = len(tokenizer)
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    tokenizer.add_tokens(new, special_tokens=True)
    ids = [int(tokenizer.convert_tokens_to_ids(token)) for token in new]
    for token, number in zip(new, ids, strict=True):
        if number < num_tokens or tokenizer.encode(token, add_special_tokens=False) != [number]:
            raise ConfigError(f"model.add_tokens: the tokenizer cannot have {token!r} as a token")
    if not new:
        return None, notes
    notes.append(f"new tokens: {', '.join(f'{t} {n}' for t, n in zip(new, ids, strict=True))}")
    return Growth(num_tokens=num_tokens, new_ids=tuple(ids), files=_files(tokenizer)), notes


def _files(tokenizer: Any) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = [path for path in Path(folder).iterdir() if CARRIED.fullmatch(path.name)]
        return {path.name: path.read_bytes() for path in paths}
