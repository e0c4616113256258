"""Media of rows: the same row in the forms of several tools, and places that do not fit."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from megatrain.data.rows import cells
from megatrain.data.rows.columns import detect_format
from megatrain.data.rows.media import NO_MEDIUM, PLACES_DIFFER, Medium, words_of
from megatrain.data.rows.rows import Row, canonical
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import DataError

A = {"role": "assistant", "content": "a cat"}
ASKED = "What is it?"
DATA = b"\x89PNG bytes"
AS_URL = "data:image/png;base64," + base64.b64encode(DATA).decode()


def _row(value: dict[str, Any]) -> Row:
    return canonical(value, detect_format([value]))


def _user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}, A]}


TEXT = {"type": "text", "text": ASKED}
FORMS: dict[str, dict[str, Any]] = {
    "TRL, a place": {**_user({"type": "image"}, TEXT), "images": ["a.png"]},
    "TRL, no place": {"messages": [{"role": "user", "content": ASKED}, A], "images": ["a.png"]},
    "TRL, one image": {"messages": [{"role": "user", "content": ASKED}, A], "image": "a.png"},
    "TRL, prompt": {"prompt": ASKED, "completion": "a cat", "images": ["a.png"]},
    "TRL, prompt of turns": {
        "prompt": [{"role": "user", "content": ASKED}], "completion": [A], "images": ["a.png"],
    },
    "LLaMA-Factory": {
        "conversations": [
            {"from": "human", "value": f"<image>{ASKED}"}, {"from": "gpt", "value": "a cat"},
        ],
        "images": ["a.png"],
    },
    "LLaMA-Factory, alpaca": {
        "instruction": f"<image>{ASKED}", "input": "", "output": "a cat", "images": ["a.png"],
    },
    "a cell of a table": {
        "instruction": f"<image>{ASKED}", "output": "a cat", "images": '["a.png"]',
    },
    "OpenAI": _user({"type": "image_url", "image_url": {"url": "a.png"}}, TEXT),
    "OpenAI, responses": _user({"type": "input_image", "image_url": "a.png"}, TEXT),
    "transformers": _user({"type": "image", "image": "a.png"}, TEXT),
    "transformers, url": _user({"type": "image", "url": "a.png"}, TEXT),
    "datasets": {**_user({"type": "image"}, TEXT), "images": [{"bytes": None, "path": "a.png"}]},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_the_same_row_in_any_form(form: str) -> None:
    row = _row(FORMS[form])
    assert row.media == (Medium(kind="image", name="a.png"),)
    assert [message["content"] for message in row.messages] == [
        [{"type": "image"}, TEXT],
        [{"type": "text", "text": "a cat"}],
    ]
    assert row.unused == ()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": AS_URL}},
        {"type": "image", "image": DATA},
        {"type": "image", "image": {"bytes": DATA, "path": "/etc/passwd"}},
        {"type": "image", "base64": AS_URL},
    ],
    ids=str,
)
def test_bytes_in_a_row_need_no_file(part: dict[str, Any]) -> None:
    assert _row(_user(part, TEXT)).media == (Medium(kind="image", data=DATA),)


def test_a_sound_of_an_api() -> None:
    heard = {"data": base64.b64encode(DATA).decode(), "format": "wav"}
    row = _row(_user({"type": "input_audio", "input_audio": heard}, TEXT))
    assert row.media == (Medium(kind="audio", data=DATA),)


def test_media_stand_where_their_marks_do() -> None:
    talk = [
        {"from": "human", "value": "a <image> b <image> <audio>"},
        {"from": "gpt", "value": "<image>"},
    ]
    row = _row({"conversations": talk, "images": ["1", "2", "3"]})
    assert [medium.name for medium in row.media] == ["1", "2", "3"]
    first, second = (message["content"] for message in row.messages)
    assert [part.get("text", part["type"]) for part in first] == [
        "a ", "image", " b ", "image", " <audio>",
    ]  # fmt: skip
    assert second == [{"type": "image"}]
    assert words_of(first) == "a  b  <audio>"


def test_a_mark_without_a_column_is_text() -> None:
    row = _row({"messages": [{"role": "user", "content": "what is <image>?"}, A]})
    assert row.media == ()
    assert row.messages[0]["content"] == "what is <image>?"


def test_both_answers_of_a_preference_have_the_media() -> None:
    value = {"prompt": ASKED, "chosen": "a cat", "rejected": "a dog", "images": ["a.png"]}
    row = _row(value)
    assert row.rejected is not None
    assert row.media == row.rejected.media == (Medium(kind="image", name="a.png"),)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({**_user({"type": "image"}, TEXT), "images": ["a", "b"]}, PLACES_DIFFER),
        ({**_user({"type": "image"}, {"type": "image"}, TEXT), "images": ["a"]}, PLACES_DIFFER),
        ({**_user({"type": "image", "image": "b"}, {"type": "image"}, TEXT)}, PLACES_DIFFER),
        ({**_user({"type": "image"}, TEXT), "audios": ["a"]}, PLACES_DIFFER),
        ({**_user(TEXT), "images": [None]}, cells.IS_NULL),
        ({**_user(TEXT), "images": [7]}, NO_MEDIUM),
        ({**_user(TEXT), "images": [""]}, NO_MEDIUM),
        ({**_user(TEXT), "images": ["data:image/png;base64,???"]}, NO_MEDIUM),
        ({**_user(TEXT), "images": [{"width": 1}]}, NO_MEDIUM),
    ],
    ids=str,
)
def test_media_that_do_not_fit(value: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow) as refused:
        _row(value)
    assert refused.value.reason == reason


def test_an_image_of_a_program_keeps_its_pixels() -> None:
    image = pytest.importorskip("PIL.Image")
    made = image.new("RGBA", (3, 2), (1, 2, 3, 4))
    (medium,) = _row(_user({"type": "image", "image": made}, TEXT)).media
    assert medium.data is not None
    assert medium.data.startswith(b"\x89PNG")


@pytest.mark.parametrize("cell", ["a.png", ["a.png"], {"path": "a.png"}])
def test_a_column_of_media_may_have_another_name(cell: object) -> None:
    value = {"prompt": ASKED, "completion": "a cat", "photo": cell}
    assert _row(value).media == ()
    shape = detect_format([value], columns={"images": "photo"})
    assert canonical(value, shape) == _row({**FORMS["TRL, prompt"]})
    with pytest.raises(DataError, match=r"columns has images: foto, .*Did you mean photo"):
        detect_format([value], columns={"images": "foto"})
