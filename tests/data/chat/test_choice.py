"""The chat template of the config: a file, a text, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.data.chat.choice import choose_template, exported_template
from megatrain.errors import DataError
from testkit.tokenizers_of_kinds import KINDS, made

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def _tokenizer() -> Any:
    return made(KINDS["chatml"].template, KINDS["chatml"].marks, eos="<|im_end|>")


def test_each_kind_of_choice(tmp_path: Path) -> None:
    file = tmp_path / "a.jinja"
    file.write_text(TEMPLATE)
    for wanted, found in (
        (None, KINDS["chatml"].template),
        ("none", None),
        (TEMPLATE, TEMPLATE),
        (str(file), TEMPLATE),
    ):
        tokenizer = _tokenizer()
        choose_template(tokenizer, wanted)
        assert tokenizer.chat_template == found


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("gone.jinja", r"gone\.jinja is not a file\. Give a file, a template \(text with \{\{ or"),
        ("{% for %}", r"data\.chat_template: line 1: "),
    ],
)
def test_what_is_no_template_is_refused(wanted: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        choose_template(_tokenizer(), wanted)


@pytest.mark.parametrize("data", [b"plain words", b"\xff{{", b"{{ x }}" + b" " * 2**20])
def test_a_file_that_is_no_template_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.jinja"
    path.write_bytes(data)
    with pytest.raises(
        DataError,
        match=r"(a\.jinja is not a chat template|cannot read "
        r".*a\.jinja)",
    ):
        choose_template(_tokenizer(), str(path))


def test_an_export_carries_the_template_that_was_trained_with() -> None:
    tokenizer = _tokenizer()
    choose_template(tokenizer, TEMPLATE)
    assert exported_template(tokenizer, TEMPLATE) == {"chat_template.jinja": TEMPLATE.encode()}
    assert exported_template(tokenizer, None) == exported_template(tokenizer, "none") == {}
