"""Reads that fail once are tried again; damage is not."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

import pytest

from megatrain.disk.checkpoint.retried import PAUSES_S, retried
from megatrain.errors import CheckpointCorrupted, DiskError, DiskFull


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    taken: list[float] = []
    monkeypatch.setattr(time, "sleep", taken.append)
    return taken


def failing(errors: list[Exception]) -> Callable[[], int]:
    """Return a read that fails with these errors, one each time, and then returns their number."""
    given = iter(errors)

    def read() -> int:
        for error in given:
            raise error
        return len(errors)

    return read


def disk_error(number: int) -> DiskError:
    error = DiskError("cannot read it")
    error.__cause__ = OSError(number, os.strerror(number))
    return error


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("count", range(len(PAUSES_S) + 1))
def test_a_read_that_answers_in_the_end_is_read(
    number: int, count: int, pauses: list[float]
) -> None:
    assert retried(failing([disk_error(number)] * count)) == count
    assert pauses == list(PAUSES_S[:count])


def test_one_that_never_answers_is_given_up(pauses: list[float]) -> None:
    with pytest.raises(DiskError, match="cannot read it"):
        retried(failing([disk_error(errno.EIO)] * 99))
    assert pauses == list(PAUSES_S)


@pytest.mark.parametrize(
    "error",
    [
        CheckpointCorrupted("its hash differs"),
        DiskFull("no space"),
        DiskError("ends at byte 3"),
        disk_error(errno.EACCES),
    ],
)
def test_what_no_wait_repairs_is_raised_at_once(error: Exception, pauses: list[float]) -> None:
    with pytest.raises(type(error), match=str(error)):
        retried(failing([error]))
    assert pauses == []
