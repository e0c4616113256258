"""Figures as people read them, and text of others that is safe to print."""

from __future__ import annotations

import math
import unicodedata

_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of Unicode: controls, invisible marks, halves of pairs, separators."""
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def figure(value: float) -> str:
    """Return four significant digits: 2.314, 2,155, 98.3M, 9.8e-6."""
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else ("infinite" if value > 0 else "-infinite")
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return _power(value)
    for unit, letter in _COUNTS:
        if size >= max(unit * 0.9995, 9999.5):
            return f"{value / unit:.3g}{letter}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def count(value: float) -> str:
    """Return an integer, written out below a million."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    return figure(value)


def counted(number: int, noun: str) -> str:
    """Return a number of things: 1 row, 2,048 rows."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(num_bytes: float) -> str:
    """Return bytes in the unit that gives a short number."""
    if math.isfinite(num_bytes):
        for unit, name in _SIZES:
            if abs(num_bytes) >= unit:
                return f"{num_bytes / unit:,.1f} {name}"
    return f"{figure(num_bytes)} bytes"


def byte_rate(rate: float) -> str:
    """Return bytes per second, as data sheets print them."""
    return f"{rate / 1e9:.3g} GB/s"


def flop_rate(rate: float) -> str:
    """Return operations per second in the unit that gives a short number."""
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def duration(seconds: float) -> str:
    """Return a time in its two largest units."""
    if not math.isfinite(seconds):
        return figure(seconds)
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24:,} d {hours % 24:02} h"


def percent(share: float) -> str:
    """Return a share of one in percent; below one percent, as "under 1%"."""
    if not math.isfinite(share):
        return figure(share)
    return "under 1%" if 0 < share < 0.01 else f"{share * 100:.0f}%"


def printable(text: str) -> str:
    """Return text of a row or a model with every character that a terminal would obey shown.

    Escape sequences clear screens, forge lines and write clipboards, and directional marks reorder
    what is on a line: ESC becomes `\\x1b`, U+202E becomes `\\u202e`. Line breaks and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    """Return a character, or its escape if it is a control, a mark of direction or a separator."""
    if character in "\n\t" or unicodedata.category(character) not in _OBEYED:
        return character
    if unicodedata.category(character) == "Cf" and unicodedata.bidirectional(character) == "BN":
        return character  # joins emoji and letters; it moves nothing
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x80 else f"\\u{number:04x}"


def _power(value: float) -> str:
    mantissa, power = f"{value:.3g}".split("e") if "e" in f"{value:.3g}" else (f"{value:.3g}", "")
    return f"{mantissa}e{int(power)}" if power else mantissa
