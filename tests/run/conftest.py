"""Runs of this folder: a tiny model with rows, and children that start from a warm process.

A child of `multiprocessing`'s spawn method imports transformers for a second, and every run with a
new cache starts some. Those of a fork server do the same work. Children that are new interpreters
are tested in tests/data and wherever `megatrain` is a program.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain.disk.checkpoint import retried
from testkit.runs import write_world

PRELOADED = ["megatrain.data.tokens.prepare", "transformers"]


@pytest.fixture(scope="package", autouse=True)
def _warm_children() -> Iterator[None]:
    multiprocessing.set_forkserver_preload(PRELOADED)
    get_context = multiprocessing.get_context

    def warm(method: str | None = None) -> Any:
        return get_context("forkserver" if method == "spawn" else method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", warm)
        yield


@pytest.fixture(scope="package", autouse=True)
def _reads_again_at_once() -> Iterator[None]:
    """Try again without a pause to read what a test makes unreadable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retried, "PAUSES_S", (0.0,) * len(retried.PAUSES_S))
        yield


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and rows to train it on."""
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    return folder


@pytest.fixture(scope="module")
def cache_in_world(world: Path) -> Iterator[None]:
    """Prepare the rows of a world once for all tests and fixtures of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRAIN_CACHE", str(world / "cache"))
        yield
