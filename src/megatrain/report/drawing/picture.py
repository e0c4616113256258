"""A small picture on a page: pixels in a PNG that is written here, as a data URL.

Pixels may come from anybody. The file around them is ours: whatever they are, a page has no byte
that a decoder of a browser would read as anything but so many rows of colors.

Law (tests/report/drawing/test_picture.py): a decoder finds the pixels that were given.
"""

from __future__ import annotations

import base64
import struct
import zlib

from megatrain.report.drawing.markup import Html, tag

TOKENS_STYLE = tag(
    "style",
    Html(
        ".tokens{white-space:pre-wrap;overflow-wrap:anywhere}"
        ".tokens mark{background:#0a72;color:inherit;border-bottom:2px solid #0a7}"
        ".tokens img{max-height:6em;vertical-align:middle;margin:2px}"
        ".tokens code{opacity:.7}"
    ),
)
"""For rows whose trained tokens are marked, with pictures among them."""


def picture(width: int, height: int, rgb: bytes, label: str) -> Html:
    """Return an image of so many pixels, three bytes each, row by row."""
    data = base64.b64encode(_png(width, height, rgb)).decode()
    return tag("img", src=f"data:image/png;base64,{data}", alt=label, title=label)


def _png(width: int, height: int, rgb: bytes) -> bytes:
    assert len(rgb) == 3 * width * height, "three bytes of each pixel"
    rows = (rgb[start : start + 3 * width] for start in range(0, len(rgb), 3 * width))
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)  # 0: as they are
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, in colors
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", head)
        + _chunk(b"IDAT", pixels)
        + _chunk(b"IEND", b"")
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
