"""Figures as people read them, and text of others that is safe to print."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.text import count, duration, figure, percent, printable, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (2.31412, "2.314"), (2155.0, "2,155"), (9999, "9,999"), (10_000, "10k"),
        (98_304_000, "98.3M"), (1.2e9, "1.2B"), (1e-5, "1e-5"), (9.8e-6, "9.8e-6"),
        (-0.25, "-0.25"), (1e40, "1e40"), (999_999, "1M"), (math.nan, "not a number"),
        (math.inf, "infinite"), (-math.inf, "-infinite"),
    ],
)  # fmt: skip
def test_figures(value: float, text: str) -> None:
    assert figure(value) == text


def test_counts_sizes_times_and_shares() -> None:
    assert [count(49_152), count(2_000_000), count(1.5)] == ["49,152", "2M", "1.5"]
    assert [size(512), size(64 * 2**20), size(117.4 * 2**30)] == [
        "512 bytes", "64.0 MiB", "117.4 GiB"]  # fmt: skip
    assert [duration(s) for s in (0.0121, 1.9, 59.99, 200, 3840, 183_600)] == [
        "12.1 ms", "1.9 s", "1 min 00 s", "3 min 20 s", "1 h 04 min", "2 d 03 h"]  # fmt: skip
    assert [percent(share) for share in (0, 0.001, 0.834, 1)] == [
        "0%",
        "under 1%",
        "83%",
        "100%",
    ]


HOSTILE = {
    "colors": ("hi \x1b[31mRED", "hi \\x1b[31mRED"),
    "a title, ended by BEL": ("\x1b]0;pwned\x07", "\\x1b]0;pwned\\x07"),
    "the clipboard, ended by ST": ("\x1b]52;c;eA==\x1b\\", "\\x1b]52;c;eA==\\x1b\\"),
    "a cleared screen in one byte": ("\x9b2J", "\\u009b2J"),
    "an overwritten line": ("loss 9.0\rloss 0.1", "loss 9.0\\x0dloss 0.1"),
    "a word read backwards": ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
    "a line break that is none": ("a\u2028b", "a\\u2028b"),
    "half of a pair": ("\ud800", "\\ud800"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_terminal_would_obey_is_shown(what: str) -> None:
    text, shown = HOSTILE[what]
    assert printable(text) == shown
    shown.encode()  # can be printed


@pytest.mark.parametrize(
    "text", ["plain", "two\nlines\tand a tab", "größer 火 e\u0301", "👨\u200d👩", ""]
)
def test_ordinary_text_stays(text: str) -> None:
    assert printable(text) == text


@given(st.text())
def test_no_control_passes(text: str) -> None:
    shown = printable(text)
    assert not {c for c in shown if ord(c) < 32 or 127 <= ord(c) < 160} - {"\n", "\t"}
    assert printable(shown) == shown
