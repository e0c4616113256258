"""A decoder finds the pixels that were given."""

from __future__ import annotations

import base64
import io
import random
import re

import pytest

from megatrain.report.drawing.picture import picture


@pytest.mark.parametrize(("width", "height"), [(1, 1), (7, 3), (96, 96)])
def test_pixels_come_back(width: int, height: int) -> None:
    from PIL import Image

    rgb = random.Random(0).randbytes(3 * width * height)
    html = picture(width, height, rgb, 'a "label" <b>')
    found = re.search(r'src="data:image/png;base64,([^"]+)"', html)
    assert found is not None
    image = Image.open(io.BytesIO(base64.b64decode(found[1])))
    image.load()
    assert (image.size, image.mode, image.tobytes()) == ((width, height), "RGB", rgb)
    assert 'alt="a &quot;label&quot; &lt;b&gt;"' in html


def test_pixels_that_do_not_fit_their_size_are_none() -> None:
    with pytest.raises(AssertionError, match="three bytes"):
        picture(2, 2, b"rgb", "")
