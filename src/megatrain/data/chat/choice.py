"""The chat template of the config, which replaces that of the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from megatrain.data.chat.template import compile_template
from megatrain.errors import DataError

NONE = "none"
MAX_TEMPLATE_BYTES = 2**20
_MARKS = ("{{", "{%")


def choose_template(tokenizer: Any, wanted: str | None) -> None:
    """Give `tokenizer` the template that `wanted` names: a file, a template, or `none`.

    None keeps its own. Raises DataError if it is not a file or a template, or has an error.
    """
    if wanted is None:
        return
    if wanted == NONE:
        tokenizer.chat_template = None
        return
    source = wanted if _is_template(wanted) else _read(Path(wanted))
    try:
        compile_template(source)
    except TemplateSyntaxError as error:
        raise DataError(f"data.chat_template: line {error.lineno}: {error.message}") from error
    tokenizer.chat_template = source


def exported_template(tokenizer: Any, wanted: str | None) -> dict[str, bytes]:
    """Return the file that gives an exported tokenizer the template it was trained with, by name.

    Empty for its own template and for `none`: inference may still use the tokenizer's own.
    """
    if wanted is None or wanted == NONE:
        return {}
    return {"chat_template.jinja": tokenizer.chat_template.encode()}


def _is_template(text: str) -> bool:
    return any(mark in text for mark in _MARKS)


def _read(path: Path) -> str:
    if not path.is_file():
        raise DataError(
            f"data.chat_template: {path} is not a file. Give a file, a template (text with {{{{ or "
            "{%), or none."
        )
    try:
        data = path.read_bytes()[: MAX_TEMPLATE_BYTES + 1]
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.chat_template: cannot read {path}: {error}") from error
    if len(data) > MAX_TEMPLATE_BYTES or not _is_template(text):
        raise DataError(f"data.chat_template: {path} is not a chat template")
    return text
