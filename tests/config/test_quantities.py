"""Quantities: as people write them, and nothing else; every size survives being written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config.quantities import (
    LARGEST,
    SMALLEST_BYTES,
    or_auto,
    read_bytes,
    read_cadence,
    read_count,
    read_length,
    read_number,
    read_seconds,
    read_tokens,
    read_whole,
    write_bytes,
)

READERS = [
    read_number,
    read_whole,
    read_tokens,
    read_count,
    read_bytes,
    read_length,
    read_seconds,
    read_cadence,
    or_auto(read_bytes),
]


@pytest.mark.parametrize(
    ("read", "written", "meant"),
    [
        (read_number, "1e-5", 1e-5),
        (read_number, " 1_000 ", 1000),
        (read_number, ".5", 0.5),
        (read_whole, "1e3", 1000),
        (read_whole, 20.0, 20),
        (read_tokens, "128k", 131072),
        (read_tokens, "1.5K", 1536),
        (read_tokens, "1M", 1 << 20),
        (read_tokens, "2048", 2048),
        (read_count, "1B", 10**9),
        (read_count, "300M", 3 * 10**8),
        (read_count, "1e9", 10**9),
        (read_seconds, "30s", 30.0),
        (read_seconds, "1.5 h", 5400.0),
        (read_seconds, 20, 20.0),
        (read_cadence, 500, 500),
        (read_cadence, "120s", "2min"),
        (read_bytes, "24GB", 24 * 10**9),
        (read_bytes, "24 gib", 24 << 30),
        (read_bytes, "0.5TB", 5 * 10**11),
        (read_bytes, 1 << 30, 1 << 30),
        (read_length, "0.03", 0.03),
        (read_length, 100, 100),
        (or_auto(read_bytes), "auto", "auto"),
    ],
)
def test_what_people_write(read: Callable[[object], Any], written: object, meant: object) -> None:
    assert read(written) == meant
    assert type(read(written)) is type(meant)


@pytest.mark.parametrize(
    ("read", "written", "text"),
    [
        (read_number, True, "give a number"),
        (read_number, "1e-5x", "give a number"),
        (read_number, 1e300, "give a finite number of usual size"),
        (read_number, float("nan"), "give a finite number of usual size"),
        (read_whole, 1.5, "give a whole number"),
        (read_tokens, "2 rows", "give a number of tokens, like 2048 or 128k"),
        (read_tokens, 0, "give a number of tokens, at least 1"),
        (read_tokens, "1.0001k", "give a number of tokens, like 2048 or 128k"),
        (read_seconds, "soon", "give a time, like 30s, 5min or 2h"),
        (read_seconds, "0s", "give a time above 0, like 30s, 5min or 2h"),
        (read_cadence, 0, "give at least 1 step, or a time, like 30min"),
        (read_cadence, "often", "give steps, like 500, or a time, like 30min"),
        (read_bytes, "128", "give the unit: 128GB (powers of 1000) or 128GiB"),
        (read_count, "1X", "give a number of tokens, like 1e9, 300M or 1B"),
        (read_count, 0, "give a number of tokens, at least 1"),
        (read_bytes, "24G", "give the unit: 24GB (powers of 1000) or 24GiB"),
        (read_bytes, 24, "that is less than 1 MiB. Give a size with its unit, like 24GB"),
        (read_bytes, "big", "give a size, like 24GB or 128GiB"),
        (read_length, 1.5, "give a number of steps, like 100, or a fraction of the run between 0 "
                           "and 1, like 0.03"),
        (read_length, "soon", "give steps, like 100, or a fraction of the run, like 0.03"),
        (or_auto(read_whole, least=2), 1, "give at least 2, or auto"),
        (or_auto(read_bytes), "x", "give a size, like 24GB or 128GiB, or auto"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(read: Callable[[object], Any], written: object, text: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared whole
        read(written)
    assert str(error.value) == text


@given(st.integers(SMALLEST_BYTES, LARGEST))
def test_every_size_survives_being_written(num_bytes: int) -> None:
    assert read_bytes(write_bytes(num_bytes)) == num_bytes


def test_a_writer_that_rounds_would_be_noticed() -> None:
    def rounded(num_bytes: int) -> str:
        return f"{num_bytes / 2**30:.2f}GiB"

    assert read_bytes(rounded(24 << 30)) == 24 << 30
    assert read_bytes(rounded((24 << 30) + 1)) != (24 << 30) + 1


@given(
    st.one_of(
        st.text(max_size=20),
        st.text("0123456789eE.+-_kKMGiBb ", max_size=12),
        st.integers(),
        st.floats(),
        st.none(),
        st.lists(st.none(), max_size=1),
        st.booleans(),
    )
)
def test_readers_raise_nothing_but_value_errors(value: object) -> None:
    for read in READERS:
        try:
            result = read(value)
        except ValueError:
            continue
        assert result == "auto" or abs(float(result)) <= LARGEST
