"""Images and sounds of a run: what towers did ahead of it, and a few rows with their pictures.

The file that says so is not trusted: a picture is so many pixels, or it is left out.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatrain.report.drawing.markup import Html, join_html, tag
from megatrain.report.drawing.picture import TOKENS_STYLE, picture
from megatrain.report.run import Run, number
from megatrain.report.tables import facts_table
from megatrain.text import duration, size

_MOST_SAMPLES = 4
_MOST_STRETCHES = 200
_MOST_CHARACTERS = 3000
_LONGEST_SIDE = 256


def media_section(runs: Sequence[Run]) -> Html:
    """Return what was done for media, and rows that have some; nothing if no run has."""
    if not any(run.media for run in runs):
        return Html()
    table = facts_table(runs, [dict(_facts(run.media)) for run in runs], "Images and sounds")
    samples = [
        _sample(sample, f"{run.name}: " if len(runs) > 1 else "")
        for run in runs
        for sample in _objects(run.media.get("samples"))[:_MOST_SAMPLES]
    ]
    return join_html([TOKENS_STYLE, table, *samples])


def has_pictures(runs: Sequence[Run]) -> bool:
    """Return whether pictures may stand on the page of these runs."""
    return any(run.media for run in runs)


def _facts(media: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("items", "tokens"):
        if (count := number(media.get(name))) is not None:
            yield name, f"{count:,.0f}"
    if isinstance(media.get("trained"), str):
        yield "trained of towers", str(media["trained"])
    towers = media.get("towers")
    if not isinstance(towers, dict):
        return
    for name, title in (("computed", "outputs computed"), ("found", "outputs found in the cache")):
        if (count := number(towers.get(name))) is not None:
            yield title, f"{count:,.0f}"
    seconds, num_bytes = number(towers.get("seconds")), number(towers.get("bytes"))
    if seconds is not None and 0 <= seconds < 1e9:
        yield "time of towers, before the run", duration(seconds)
    if num_bytes is not None and 0 <= num_bytes < 1e18:
        yield "outputs in the cache", size(num_bytes)


def _sample(sample: Mapping[str, Any], prefix: str) -> Html:
    parts = [_stretch(one) for one in _objects(sample.get("stretches"))[:_MOST_STRETCHES]]
    title = tag("h3", f"{prefix}{sample.get('title', '')}"[:200])
    return tag("article", title, tag("p", *parts, class_="tokens"), class_="sample")


def _stretch(stretch: Mapping[str, Any]) -> str:
    text = str(stretch.get("text", ""))[:_MOST_CHARACTERS]
    if not stretch.get("medium"):
        return tag("mark", text) if stretch.get("trained") is True else text
    name = tag("code", f"[{text}]")
    pixels = _pixels(stretch)
    return name if pixels is None else join_html([picture(*pixels, text), name])


def _pixels(stretch: Mapping[str, Any]) -> tuple[int, int, bytes] | None:
    """Return width, height and colors of a picture; None: there is none, or it is not whole."""
    width, height, told = (stretch.get(name) for name in ("width", "height", "rgb"))
    if type(width) is not int or type(height) is not int or not isinstance(told, str):
        return None
    if not 0 < width <= _LONGEST_SIDE or not 0 < height <= _LONGEST_SIDE:
        return None
    try:
        rgb = base64.b64decode(told, validate=True)
    except (ValueError, binascii.Error):
        return None
    return (width, height, rgb) if len(rgb) == 3 * width * height else None


def _objects(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
