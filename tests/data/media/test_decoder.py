"""Decoding in another process: any bytes are pixels or a bad row, in bounded time and memory."""

from __future__ import annotations

import io
import multiprocessing
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from megatrain.data.media.decoder import DIED, TOO_MANY_BYTES, TOO_SLOW, Decoder, MediaLimits
from megatrain.data.media.resampling import resampled
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import MissingPackage
from testkit.faulty_decoders import dies, hangs, lies
from testkit.processors import picture, sound
from tests.attacks.media_corpus import MEDIA

LIMITS = MediaLimits(bytes=1 << 22, pixels=1_000_000, seconds=2.0)


@pytest.fixture(scope="module")
def decoder() -> Iterator[Decoder]:
    with Decoder(LIMITS) as found:
        yield found


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_pixels_are_those_of_pillow(decoder: Decoder, form: str) -> None:
    from PIL import Image

    data = picture(3, 20, 10, form)
    found = decoder.image(data)
    assert (found.width, found.height) == (20, 10)
    assert found.rgb == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_a_photo_is_turned_upright(decoder: Decoder) -> None:
    from PIL import Image

    out = io.BytesIO()
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (8, 4)).save(out, "JPEG", exif=turned)
    assert (decoder.image(out.getvalue()).width, decoder.image(out.getvalue()).height) == (4, 8)


def test_samples_are_between_minus_one_and_one(decoder: Decoder) -> None:
    data = sound(1)
    whole = np.frombuffer(data[44:], "<i2").astype(np.float32) / np.float32(32768)
    assert np.array_equal(np.frombuffer(decoder.sound(data, 16_000), "<f4"), whole)
    other = np.frombuffer(decoder.sound(data, 11_025), "<f4")
    assert np.array_equal(other, resampled(whole, 16_000, 11_025))


@pytest.mark.parametrize("name", MEDIA)
def test_hostile_media_are_bad_rows(decoder: Decoder, name: str) -> None:
    kind, data, reason = MEDIA[name]
    with pytest.raises(BadRow) as refused:
        decoder.image(data()) if kind == "image" else decoder.sound(data(), 16_000)
    assert refused.value.reason == reason
    assert decoder.image(picture()).width == 24


def test_more_bytes_than_allowed_are_not_sent(decoder: Decoder) -> None:
    with pytest.raises(BadRow, match=TOO_MANY_BYTES):
        decoder.image(bytes(LIMITS.bytes + 1))


def test_a_decoder_that_hangs_is_replaced() -> None:
    with Decoder(LIMITS, limit_s=1.0, work=hangs) as decoder:
        with pytest.raises(BadRow, match=TOO_SLOW):
            decoder.image(b"!")
        assert decoder.image(b".").rgb == b"rgb"


def test_a_decoder_that_dies_is_a_bad_row() -> None:
    with Decoder(LIMITS, work=dies) as decoder, pytest.raises(BadRow, match=DIED) as refused:
        decoder.image(b".")
    assert "exit code 9" in refused.value.detail


@pytest.mark.parametrize(
    "answer",
    [
        b'{"width": 2, "height": 1}',
        b'{"width": -1, "height": -1}',
        b"[]",
        b"{}",
        b"\xff",
        b"9" * 9999,
    ],
    ids=str,
)
def test_an_answer_is_not_believed(answer: bytes) -> None:
    with Decoder(LIMITS, work=lies) as decoder, pytest.raises(BadRow):
        decoder.image(b"!" + answer)


def test_no_process_outlives_its_decoder() -> None:
    before = set(multiprocessing.active_children())
    with Decoder(LIMITS, work=hangs) as decoder:
        decoder.image(b".")
        assert len(set(multiprocessing.active_children()) - before) == 1
    assert set(multiprocessing.active_children()) <= before


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingPackage, match=r"megatrain\[media\]"):
        Decoder(LIMITS)
