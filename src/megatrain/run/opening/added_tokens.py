"""New special tokens: into the tokenizer of a run, and with it into its data, model and exports."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain.disk.hf.growth import Growth
from megatrain.errors import ConfigError
from megatrain.model_files import CARRIED


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> tuple[Growth | None, list[str]]:
    """Add tokens to the tokenizer; return what the model must grow by, and what to say of it.

    None: it has all of them already. Raises ConfigError for one that cannot be a token.
    """
    known = {token: number for token, number in tokenizer.get_vocab().items() if token in tokens}
    notes = [f"model.add_tokens: {t} is token {n} already" for t, n in sorted(known.items())]
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
