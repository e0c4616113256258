"""Quantities as people write them: 1e-5, "1e-5", 128k, 24GB, 128GiB.

    tokens   k and M count by 1024, as context lengths are written: 128k is 131072
    counts   k, M, B and T count by 1000, as data sets are: 1B tokens
    bytes    GB is 10^9, GiB is 2^30; a bare number is refused unless it can be meant as bytes
    times    s, min, h and d; a bare number is seconds
    memory   sizes of modules and cards, which are powers of two: GB and GiB are 2^30, TB is 2^40

A reader takes a value from YAML, JSON or Python and returns a number, or raises ValueError with a
text that ends the sentence "KEY is VALUE; ...". None of them accepts a bool as a number.

Laws (tests/config/test_quantities.py): `read_bytes(write_bytes(n)) == n`, and so for times; no
reader raises anything but ValueError.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

LARGEST = 1 << 60
"""Larger counts and numbers of bytes are refused as mistakes."""
SMALLEST_BYTES = 1 << 20
_NUMBER = re.compile(r"[+-]?(\d[\d_]{0,40}(\.\d{0,40})?|\.\d{1,40})(e[+-]?\d{1,4})?", re.I)
_SCALED = re.compile(r"([\d._]{1,40}(?:e[+-]?\d{1,3})?) ?([a-z]{1,3})", re.I)
_TOKEN_UNITS = {"k": 1 << 10, "ki": 1 << 10, "m": 1 << 20, "mi": 1 << 20}
_COUNT_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTE_UNITS = {
    "tib": 1 << 40, "gib": 1 << 30, "mib": 1 << 20, "kib": 1 << 10,
    "tb": 10**12, "gb": 10**9, "mb": 10**6, "kb": 10**3, "b": 1,
}  # fmt: skip
_TIME_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_BYTE_NAMES = {"tib": "TiB", "gib": "GiB", "mib": "MiB", "gb": "GB", "mb": "MB"}


def read_number(value: object) -> float | int:
    """Return a finite number; text like "1e-5" counts, an integer stays one."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        text = value.strip().replace("_", "")
        value = int(text) if text.lstrip("+-").isdigit() else float(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("give a number")
    if abs(value) > LARGEST or not math.isfinite(value):
        raise ValueError("give a finite number of usual size")
    return value


def read_whole(value: object) -> int:
    """Return an integer; 1e3 and 20.0 are accepted."""
    try:
        number = read_number(value)
    except ValueError:
        raise ValueError("give a whole number") from None
    if number != int(number):
        raise ValueError("give a whole number")
    return int(number)


def read_tokens(value: object) -> int:
    """Return a number of tokens, at least 1."""
    scaled = _scaled(value, _TOKEN_UNITS)
    try:
        tokens = read_whole(value) if scaled is None else read_whole(scaled)
    except ValueError:
        raise ValueError("give a number of tokens, like 2048 or 128k") from None
    if tokens < 1:
        raise ValueError("give a number of tokens, at least 1")
    return tokens


def read_count(value: object) -> int:
    """Return a number of tokens to train on, at least 1; k, M, B and T are powers of 1000."""
    scaled = _scaled(value, _COUNT_UNITS)
    try:
        number = read_whole(value if scaled is None else scaled)
    except ValueError:
        raise ValueError("give a number of tokens, like 1e9, 300M or 1B") from None
    if number < 1:
        raise ValueError("give a number of tokens, at least 1")
    return number


def read_bytes(value: object) -> int:
    """Return a number of bytes, at least 1 MiB."""
    scaled = _scaled(value, _BYTE_UNITS)
    if scaled is None and isinstance(value, str) and _scaled(f"{value}B", _BYTE_UNITS) is not None:
        plain = value.strip().rstrip("kKmMgGtT")
        unit = value.strip()[len(plain) :].upper() or "G"
        raise ValueError(f"give the unit: {plain}{unit}B (powers of 1000) or {plain}{unit}iB")
    try:
        num_bytes = read_whole(value) if scaled is None else round(read_number(scaled))
    except ValueError:
        raise ValueError("give a size, like 24GB or 128GiB") from None
    if num_bytes < SMALLEST_BYTES:
        raise ValueError("that is less than 1 MiB. Give a size with its unit, like 24GB")
    return num_bytes


def read_memory(value: object) -> int:
    """Return the bytes of installed memory, as modules and cards are sold: 64GB are 64 GiB."""
    if isinstance(value, str):
        value = re.sub(r"(?i)([mgt])b?\s*$", r"\1iB", value)
    try:
        return read_bytes(value)
    except ValueError:
        raise ValueError("give a size, like 64GB") from None


def write_bytes(num_bytes: int) -> str:
    """Return a size in the largest unit that holds it exactly."""
    for unit, name in _BYTE_NAMES.items():
        if num_bytes % _BYTE_UNITS[unit] == 0:
            return f"{num_bytes // _BYTE_UNITS[unit]}{name}"
    return f"{num_bytes}B"


def _scaled(value: object, units: dict[str, int]) -> float | int | None:
    """Return text like "24GB" as a number; None if it has none of these units."""
    match = _SCALED.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2].lower() not in units:
        return None
    try:
        return read_number(match[1]) * units[match[2].lower()]
    except ValueError:
        return None


def or_auto(read: Callable[[object], int], least: int = 1) -> Callable[[object], int | str]:
    """Return a reader that also accepts `auto`, and refuses numbers below `least`."""

    def read_or_auto(value: object) -> int | str:
        if value == "auto":
            return "auto"
        try:
            number = read(value)
        except ValueError as error:
            raise ValueError(f"{error}, or auto") from None
        if number < least:
            raise ValueError(f"give at least {least}, or auto")
        return number

    return read_or_auto


def read_seconds(value: object) -> float:
    """Return a time in seconds: 30s, 5min, 2h or 1d; a bare number is seconds."""
    scaled = _scaled(value, _TIME_UNITS)
    try:
        seconds = float(read_number(value if scaled is None else scaled))
    except ValueError:
        raise ValueError("give a time, like 30s, 5min or 2h") from None
    if seconds <= 0:
        raise ValueError("give a time above 0, like 30s, 5min or 2h")
    return seconds


def write_seconds(seconds: float) -> str:
    """Return a time in the largest unit that holds it exactly; `read_seconds` reads it."""
    for unit in ("d", "h", "min"):
        if seconds % _TIME_UNITS[unit] == 0:
            return f"{seconds / _TIME_UNITS[unit]:.15g}{unit}"
    return f"{seconds:.15g}s"


def read_cadence(value: object) -> int | str:
    """Return a number of steps, or a time as `write_seconds` writes it."""
    if _scaled(value, _TIME_UNITS) is not None:
        return write_seconds(read_seconds(value))
    try:
        steps = read_whole(value)
    except ValueError:
        raise ValueError("give steps, like 500, or a time, like 30min") from None
    if steps < 1:
        raise ValueError("give at least 1 step, or a time, like 30min")
    return steps


def read_switch(value: object) -> bool | str:
    """Return true, false or `auto`."""
    if isinstance(value, bool) or value == "auto":
        return value
    if value in ("true", "false"):
        return value == "true"
    raise ValueError("give true, false or auto")


def read_rate(value: object) -> float | str:
    """Return a learning rate, above 0 and at most 1, or `auto`."""
    if value == "auto":
        return "auto"
    try:
        rate = float(read_number(value))
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None
    if not 0 < rate <= 1:
        raise ValueError("give a number above 0, 1 or less, or auto")
    return rate


def read_length(value: object) -> int | float:
    """Return a length of a run: steps if whole, a fraction of the run if below 1."""
    try:
        number = read_number(value)
    except ValueError:
        raise ValueError("give steps, like 100, or a fraction of the run, like 0.03") from None
    if number < 0 or (isinstance(number, float) and number >= 1):
        raise ValueError(
            "give a number of steps, like 100, or a fraction of the run between 0 and 1, like 0.03"
        )
    return number
