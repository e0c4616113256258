"""The loader: what `Steps` gives, made ahead, and no thread left behind."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from itertools import islice
from typing import Any

import pytest
import torch

from megatrain.batch import MicroBatch
from megatrain.data.steps.loader import Loader
from megatrain.data.steps.order import ShuffledOrder
from megatrain.data.steps.steps import Position, Steps
from megatrain.errors import DataError
from testkit.made_documents import log_normal
from testkit.patience import HANG_S, eventually

DOCUMENTS = log_normal(120, 32)


def _steps(documents: Any = DOCUMENTS) -> Steps:
    return Steps(
        documents, ShuffledOrder(120, 1), batch_tokens=128, micro_batch_tokens=64, max_length=32
    )


def _expected(num_epochs: int) -> list[list[MicroBatch]]:
    steps, position, batches = _steps(), Position(), []
    while position.epoch < num_epochs:
        batch, position = steps.batch(position)
        batches.append(batch)
    return batches


def _same(one: list[MicroBatch], other: list[MicroBatch]) -> bool:
    return len(one) == len(other) and all(
        a.inputs.keys() == b.inputs.keys()
        and torch.equal(a.labels, b.labels)
        and all(torch.equal(a.inputs[name], b.inputs[name]) for name in a.inputs)
        for a, b in zip(one, other, strict=True)
    )


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    yield
    assert [thread for thread in threading.enumerate() if thread.name == "loader"] == []


def test_a_loader_gives_what_the_steps_are() -> None:
    expected = _expected(2)
    with Loader(_steps()) as loader:
        found = list(islice(loader, len(expected)))
    assert all(_same(a, b) for a, b in zip(found, expected, strict=True))
    assert not _same(expected[0], expected[1])


def test_stops_anywhere_lose_and_repeat_nothing() -> None:
    expected, choose = _expected(2), random.Random(1)
    found: list[list[MicroBatch]] = []
    state = None
    while len(found) < len(expected):
        with Loader(_steps()) as loader:
            if state is not None:
                loader.seek(state)
            found += islice(loader, choose.randrange(1, 5))
            state = loader.state()
    assert all(_same(a, b) for a, b in zip(found, expected, strict=False))


def test_the_state_is_of_what_was_given_and_not_of_what_was_made() -> None:
    with Loader(_steps()) as loader:
        next(loader)
        time.sleep(0.2)  # long enough for the thread to be ahead
        state = loader.state()
    _, after = _steps().batch(Position())
    assert state == _steps().state(after)
    _, too_far = _steps().batch(after)
    assert state != _steps().state(too_far)


def test_seeking_back_gives_the_same_again() -> None:
    with Loader(_steps()) as loader:
        begin = loader.state()
        first = next(loader)
        next(loader)
        loader.seek(begin)
        assert _same(next(loader), first)


def test_a_closed_loader_goes_on_where_it_was() -> None:
    expected = _expected(1)
    loader = Loader(_steps())
    next(loader)
    loader.close()
    assert _same(next(loader), expected[1])
    loader.close()


def test_a_failure_in_the_thread_reaches_the_caller() -> None:
    class Broken:
        lengths, row_starts = DOCUMENTS.lengths, DOCUMENTS.row_starts

        def tokens(self, document: int) -> Any:
            raise OSError("the disk went away")

    with Loader(_steps(Broken())) as loader, pytest.raises(OSError, match="the disk went away"):
        next(loader)


def test_a_state_of_other_data_leaves_the_loader_as_it_was() -> None:
    with Loader(_steps()) as loader:
        next(loader)
        before = loader.state()
        with pytest.raises(DataError):
            loader.seek({**before, "order": "other"})
        assert loader.state() == before


@pytest.mark.merge
def test_a_loader_left_open_lets_the_program_end() -> None:
    """A thread that waits for a taker must not outlive the program's last line."""
    program = """
from tests.data.steps.test_loader import _steps
from megatrain.data.steps.loader import Loader
loader = Loader(_steps())
next(loader)
print("done")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert ended.stdout == "done\n"


def test_the_next_batch_is_made_while_a_step_is_computed() -> None:
    class Counted:
        lengths, row_starts = DOCUMENTS.lengths, DOCUMENTS.row_starts
        num_read = 0

        def tokens(self, document: int) -> Any:
            self.num_read += 1
            return DOCUMENTS.tokens(document)

    alone, ahead = Counted(), Counted()
    _, second = _steps(alone).batch(Position())
    _steps(alone).batch(second)
    with Loader(_steps(ahead)) as loader:
        next(loader)
        assert eventually(lambda: ahead.num_read >= alone.num_read)
