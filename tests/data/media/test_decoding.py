"""Media are read below one folder, never because a row says so, and decoded as `datasets` does."""

from __future__ import annotations

import io
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import pytest

from megatrain.data.media.decoding import (
    ABSENT,
    BROKEN,
    LINK,
    OUTSIDE,
    decode_image,
    decode_sound,
    read_medium,
    require_package,
)
from megatrain.data.rows.media import Medium
from megatrain.data.rows.skipped import BadRow
from megatrain.errors import MissingPackage
from testkit.processors import picture, sound, wav_samples


def _read(where: Path | None, name: str) -> bytes:
    return read_medium(Medium(kind="image", name=name), where).data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of media, beside which there is a secret."""
    inside = tmp_path / "data"
    (inside / "deep").mkdir(parents=True)
    (inside / "deep" / "a.png").write_bytes(b"picture")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    (inside / "up").symlink_to(tmp_path)
    (inside / "loop").symlink_to(inside / "loop")
    os.mkfifo(inside / "pipe.png")
    return inside


@pytest.mark.parametrize("name", ["deep/a.png", "./deep/../deep/a.png", "{}/deep/a.png"])
def test_paths_below_the_folder(folder: Path, name: str) -> None:
    assert _read(folder, name.format(folder)) == b"picture"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../secret.png", OUTSIDE),
        ("deep/../../secret.png", OUTSIDE),
        ("{}/../secret.png", OUTSIDE),
        ("link.png", OUTSIDE),
        ("up/secret.png", OUTSIDE),
        ("/dev/zero", OUTSIDE),
        ("loop", ABSENT),
        ("pipe.png", ABSENT),
        ("deep", ABSENT),
        ("gone.png", ABSENT),
        ("x" * 9999, ABSENT),
        ("http://127.0.0.1:1/x.png", LINK),
        ("HTTP://169.254.169.254/latest", LINK),
        ("file:///etc/passwd", LINK),
        ("s3://bucket/x.png", LINK),
    ],
)
def test_everything_else_is_a_bad_row(
    folder: Path, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a row makes no connection")

    monkeypatch.setattr(socket.socket, "connect", never)
    with pytest.raises(BadRow) as refused:
        _read(folder, name.format(folder))
    assert refused.value.reason == reason


def test_rows_without_a_folder_name_no_media() -> None:
    with pytest.raises(BadRow, match=ABSENT):
        _read(None, "a.png")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF"])
def test_pixels_are_those_of_pillow(form: str) -> None:
    from PIL import Image

    data = picture(3, 20, 10, form)
    found = decode_image(data)
    assert (found.size, found.mode) == ((20, 10), "RGB")
    assert found.tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_a_photo_is_turned_upright() -> None:
    from PIL import Image

    out = io.BytesIO()
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (8, 4)).save(out, "JPEG", exif=turned)
    assert decode_image(out.getvalue()).size == (4, 8)


@pytest.mark.parametrize("data", [b"", b"text", picture()[:60], picture()[:-200]], ids=len)
def test_bytes_that_are_no_image_are_a_bad_row(data: bytes) -> None:
    with pytest.raises(BadRow, match=BROKEN):
        decode_image(data)


def test_a_sound_is_decoded_at_the_rate_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(feature: datasets.Audio, value: dict[str, Any]) -> dict[str, Any]:
        return {"array": wav_samples(value["bytes"], feature.sampling_rate)}

    monkeypatch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
    monkeypatch.setattr(datasets.Audio, "decode_example", decoded)
    assert np.array_equal(decode_sound(sound(), 16_000), wav_samples(sound(), 16_000))
    with pytest.raises(BadRow, match=BROKEN):
        decode_sound(b"no sound", 16_000)


def test_torchcodec_gives_the_samples_of_a_wav() -> None:
    if find_spec("torchcodec") is None:
        pytest.skip("torchcodec is not installed")
    assert np.allclose(decode_sound(sound(), 16_000), wav_samples(sound(), 16_000), atol=1e-6)
    assert len(decode_sound(sound(rate=8000), 16_000)) == pytest.approx(3200, abs=32)


@pytest.mark.parametrize(
    ("kind", "package", "extra"), [("image", "PIL", "media"), ("audio", "torchcodec", "audio")]
)
def test_a_package_that_is_missing_is_named(
    kind: Any, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=rf"need {package}.*megatrain\[{extra}\]"):
        require_package(kind)
