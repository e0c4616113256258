"""Hostile media: what each is, how it is made, and the reason that its row is counted under."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Literal

import numpy as np

from megatrain.data.media.decoding import (
    BROKEN,
    NOT_FINITE,
    OTHER_FORMAT,
    TOO_LONG,
    TOO_MANY_PIXELS,
)
from testkit.processors import picture, sound


def chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """Return a PNG of that size in its header, with these chunks."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def _bomb() -> bytes:
    """Return gigabytes of zeros in some kilobytes, for 50,000 x 50,000 pixels."""
    return png(50_000, 50_000, chunk(b"IDAT", zlib.compress(bytes(1 << 22), 9)))


def _text_bomb() -> bytes:
    """Return a small image whose text grows to 64 MiB."""
    text = b"Comment\x00\x00" + zlib.compress(bytes(64 << 20), 9)
    return png(2, 2, chunk(b"zTXt", text), chunk(b"IDAT", zlib.compress(bytes(14))))


def _gif_bomb() -> bytes:
    """Return a GIF of 65,535 x 65,535 pixels in some bytes."""
    head = b"GIF89a" + struct.pack("<HHBBB", 65_535, 65_535, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0) + b"\x02\x02\x44\x01\x00"
    return head + frame + b";"


def _wav(code: int, channels: int, rate: int, bits: int, data: bytes) -> bytes:
    form = struct.pack(
        "<HHIIHH", code, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits
    )
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data"
    return b"RIFF" + struct.pack("<I", len(data) + 36) + body + struct.pack("<I", len(data)) + data


def _not_a_number() -> bytes:
    return _wav(3, 1, 16_000, 32, np.array([0.5, np.nan, np.inf], "<f4").tobytes())


_SVG = (
    b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg">'
    b'<image href="http://127.0.0.1/x.png"/></svg>'
)
Kind = Literal["image", "audio"]
MEDIA: dict[str, tuple[Kind, Callable[[], bytes], str]] = {
    "a PNG bomb": ("image", _bomb, TOO_MANY_PIXELS),
    "a bomb in the text of a PNG": ("image", _text_bomb, BROKEN),
    "a GIF bomb": ("image", _gif_bomb, TOO_MANY_PIXELS),
    "half a PNG": ("image", lambda: picture(0, 200, 200)[:5000], BROKEN),
    "half a JPEG": ("image", lambda: picture(0, 200, 200, "JPEG")[:5000], BROKEN),
    "a PNG without pixels": ("image", lambda: png(4, 4), BROKEN),
    "a PNG of no size": ("image", lambda: png(0, 0, chunk(b"IDAT", b"")), OTHER_FORMAT),
    "an SVG": ("image", lambda: _SVG, OTHER_FORMAT),
    "a TIFF": ("image", lambda: picture(0, 4, 4, "TIFF"), OTHER_FORMAT),
    "PostScript": ("image", lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n(x) run", OTHER_FORMAT),
    "a sound as an image": ("image", sound, OTHER_FORMAT),
    "no bytes": ("image", lambda: b"", OTHER_FORMAT),
    "an image as a sound": ("audio", picture, OTHER_FORMAT),
    "a sound of an hour": ("audio", lambda: sound(0, 4.0), TOO_LONG),
    "a sound that is not a number": ("audio", _not_a_number, NOT_FINITE),
    "a sound without samples": ("audio", lambda: _wav(1, 1, 16_000, 16, b""), BROKEN),
    "a sound of no channels": ("audio", lambda: _wav(3, 0, 16_000, 32, bytes(8)), BROKEN),
    "a sound of no rate": ("audio", lambda: _wav(1, 1, 0, 16, bytes(8)), BROKEN),
}
