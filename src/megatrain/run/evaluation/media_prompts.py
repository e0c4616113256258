"""Prompts about images and sounds that a user names: tokens, and what towers read.

Media come before the words of a prompt, in order, or where it has the marks <image> and <audio>:
the rules of rows (data/rows/media.py).

Laws (tests/run/evaluation/test_media_prompts.py)
    1. Tokens and items of a prompt are those of the model's own processor.
    2. A file that cannot be used is a DataError that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.data.media.processing import MediaProcessor, MediaSettings
from megatrain.data.rows.media import Kind
from megatrain.data.rows.rows import row_extras
from megatrain.data.rows.skipped import BadRow
from megatrain.data.rows.turns import plain_turn
from megatrain.errors import ConfigError, DataError
from megatrain.media import TextMedia
from megatrain.run.evaluation.conversation import Turn, has_template, prompt_text

_COLUMNS: Mapping[Kind, str] = {"image": "images", "audio": "audios"}
MediaFile = tuple[Kind, Path]


def read_prompts(
    talks: Sequence[Sequence[Turn]],
    files: Sequence[MediaFile],
    tokenizer: Any,
    settings: MediaSettings | None,
    template_kwargs: Mapping[str, Any],
) -> tuple[list[list[int]], list[TextMedia]]:
    """Return the text before the answer to each talk, in tokens, and its media: all of `files`.

    Raises DataError, and ConfigError if the model takes no media: `settings` are None.
    """
    if settings is None or not has_template(tokenizer):
        lacking = "processor" if settings is None else "chat template"
        raise ConfigError(
            f"{files[0][1]}: the model's folder has no {lacking} for images and sound, so it "
            "answers text alone"
        )
    columns: dict[str, list[bytes]] = {}
    for kind, path in files:
        columns.setdefault(_COLUMNS[kind], []).append(_bytes(path))
    texts: list[list[int]] = []
    media: list[TextMedia] = []
    processor = MediaProcessor(settings, tokenizer)
    for turns in talks:
        try:
            said = [plain_turn(turn["role"], turn["content"]) for turn in turns]
            row = row_extras(columns, said)
            text = prompt_text(tokenizer, row.messages, template_kwargs)
            prompt = processor.prompt(row, text)
            items = [processor.item(one.kind, one.data) for one in prompt.used]
        except BadRow as bad:
            names = ", ".join(str(path) for _, path in files)
            raise DataError(f"{names}: {bad.reason}: {bad.detail}") from bad
        texts.append(list(prompt.tokens))
        media.append(TextMedia(items=items, token_types=prompt.token_types))
    return texts, media


def _bytes(path: Path) -> bytes:
    """Return a file that the user names. Raises DataError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
