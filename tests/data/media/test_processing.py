"""Media through processors: tokens are theirs, answers are trained and media are not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.data.chat.masks import Encoder, Tokens
from megatrain.data.chat.render import TrainOn
from megatrain.data.media import processing
from megatrain.data.media.decoding import ABSENT
from megatrain.data.media.processing import (
    LEFT_OUT,
    MARKED_TEXT,
    NOT_FINITE,
    MediaProcessor,
    MediaSettings,
)
from megatrain.data.rows.cells import MEDIA
from megatrain.data.rows.columns import detect_format
from megatrain.data.rows.rows import Row, canonical
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import DataError
from testkit.processors import (
    PROCESSORS,
    picture,
    save_processor,
    sound,
    wav_samples,
)


class _Family:
    """A processor, its media and an encoder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.kind = "audio" if name == "qwen2_audio" else "image"
        self.processor = save_processor(folder, name)
        self.settings = MediaSettings(folder=folder)
        self.encoder = Encoder(self.processor.tokenizer, "assistant", None, self.settings)
        self.media = self.encoder._opened_media()
        self.make = sound if self.kind == "audio" else picture

    def row(self, count: int = 2) -> Row:
        """Return a row with media in two questions; the second has answers before and after."""
        place: dict[str, Any] = {"type": self.kind}
        words = {"type": "text", "text": "what is two"}
        talk = [
            {"role": "user", "content": [place, words]},
            {"role": "assistant", "content": "four"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "and "}, *([place] * (count - 1))],
            },
            {"role": "assistant", "content": "six and three"},
        ]
        value = {"messages": talk, f"{self.kind}s": [self.make(n) for n in range(count)]}
        return canonical(value, detect_format([value]))

    def encode(self, row: Row, train_on: TrainOn = "assistant") -> list[Tokens]:
        self.encoder.train_on = train_on
        return self.encoder.encode(row)


@pytest.fixture(scope="module", params=PROCESSORS)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[_Family]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processing, "decode_sound", wav_samples)
        yield _Family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> _Family:
    return _Family("qwen2_5_vl", tmp_path_factory.mktemp("qwen"))


def _trained_text(tokens: Tokens, processor: Any) -> str:
    pairs = zip(tokens.input_ids, tokens.trained, strict=True)
    return str(processor.tokenizer.decode([token for token, trained in pairs if trained]))


def test_tokens_are_those_of_the_processor(family: _Family) -> None:
    row = family.row()
    (document,) = family.encode(row)
    text = family.processor.apply_chat_template(list(row.messages), tokenize=False)
    assert (
        document.input_ids[:-1] == family.media.tokens_of(row, text)[: len(document.input_ids)][:-1]
    )
    assert [one.medium.kind for one in document.media] == [family.kind] * 2


def test_answers_are_trained_and_media_are_not(family: _Family) -> None:
    (document,) = family.encode(family.row())
    end = _trained_text(document, family.processor).partition("four")[2].partition("six")[0]
    assert _trained_text(document, family.processor) == f"four{end}six and three{end}"
    for train_on in ("assistant", "all"):
        (document,) = family.encode(family.row(), train_on)
        for begin, finish, _ in document.types:
            assert not any(document.trained[begin:finish])
        for one in document.media:
            assert not any(document.trained[one.begin : one.end])


def test_types_cover_each_medium_once(family: _Family) -> None:
    (document,) = family.encode(family.row())
    number = {"image": 1, "audio": 3}[family.kind]
    assert len(document.types) == len(document.media) == 2
    for (begin, end, kind), one in zip(document.types, document.media, strict=True):
        assert (kind, one.begin <= begin < end <= one.end) == (number, True)


def test_an_item_is_known_by_its_content(family: _Family) -> None:
    first, again, other = (family.media.item(family.kind, family.make(n)) for n in (0, 0, 1))  # type: ignore[arg-type]
    (document,) = family.encode(family.row())
    assert first.digest == again.digest != other.digest
    assert [one.medium.digest for one in document.media] == [first.digest, other.digest]


def test_a_processor_with_other_tokens_is_noticed(
    qwen: _Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = MediaProcessor._processed

    def wrong(self: MediaProcessor, kind: Any, data: bytes) -> Any:
        item, replacement = right(self, kind, data)
        return item, replacement + "<|image_pad|>"

    qwen.media._seen.clear()
    monkeypatch.setattr(MediaProcessor, "_processed", wrong)
    with pytest.raises(DataError, match="by the model's processor"):
        qwen.encode(qwen.row())
    qwen.media._seen.clear()


def test_a_row_that_cannot_be_compared_is_kept(
    qwen: _Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object) -> None:
        raise BadRow(ABSENT)

    wanted = qwen.encode(qwen.row())
    monkeypatch.setattr(MediaProcessor, "tokens_of", late)
    assert qwen.encode(qwen.row()) == wanted


def _refused(family: _Family, row: Row) -> str:
    with pytest.raises(BadRow) as refused:
        family.encode(row)
    return refused.value.reason


def test_words_that_stand_for_media_are_refused(qwen: _Family) -> None:
    row = qwen.row()
    for token in ("<|image_pad|>", "<|video_pad|>"):
        said = {"role": "user", "content": [{"type": "text", "text": f"see {token}"}]}
        other = replace(row, messages=(*row.messages[:2], said, row.messages[3]))
        assert _refused(qwen, other) == MARKED_TEXT


def test_a_template_that_leaves_media_out_is_noticed(
    qwen: _Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = qwen.processor.tokenizer
    forgets = tokenizer.chat_template.replace("<|image_pad|>", "")
    monkeypatch.setattr(tokenizer, "chat_template", forgets)
    encoder = Encoder(tokenizer, "assistant", None, qwen.settings)
    with pytest.raises(BadRow, match=LEFT_OUT):
        encoder.encode(qwen.row(1))


@pytest.mark.parametrize("mean", [math.nan, -math.inf])
def test_numbers_that_are_not_finite_are_refused(
    qwen: _Family, monkeypatch: pytest.MonkeyPatch, mean: float
) -> None:
    monkeypatch.setattr(qwen.media._processor.image_processor, "image_mean", [mean] * 3)
    qwen.media._seen.clear()
    assert _refused(qwen, qwen.row(1)) == NOT_FINITE


def test_a_kind_that_the_model_does_not_take(qwen: _Family) -> None:
    value = {"prompt": "hear", "completion": "yes", "audios": [sound()]}
    assert _refused(qwen, canonical(value, detect_format([value]))) == MEDIA


def test_without_a_processor_the_reason_says_so(qwen: _Family) -> None:
    with pytest.raises(BadRow) as refused:
        Encoder(qwen.processor.tokenizer).encode(qwen.row())
    assert (refused.value.reason, "no processor" in refused.value.detail) == (MEDIA, True)


def test_settings_are_told_apart(qwen: _Family, tmp_path: Path) -> None:
    other, again = tmp_path / "other", tmp_path / "again"
    save_processor(other, "gemma3")
    save_processor(again, "qwen2_5_vl")
    settings = qwen.settings
    marks = {
        one.mark()
        for one in (
            settings,
            settings.beside(tmp_path),
            replace(settings, arguments={"images_kwargs": {"do_resize": False}}),
            replace(settings, folder=other),
        )
    }
    assert len(marks) == 4
    assert replace(settings, folder=again).mark() in marks
