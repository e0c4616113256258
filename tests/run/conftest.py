"""Runs in this folder start the children that prepare data from a process that is warm.

A child of `multiprocessing`'s spawn method imports transformers for a second, and every run with a
new cache starts some. Those of a fork server do the same work. Children that are new interpreters
are tested in tests/data and wherever `megatrain` is a program.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

PRELOADED = ["megatrain.data.chat.probe", "megatrain.data.tokens.prepare", "transformers"]


@pytest.fixture(scope="session", autouse=True)
def _warm_children() -> Iterator[None]:
    multiprocessing.set_forkserver_preload(PRELOADED)
    get_context = multiprocessing.get_context

    def warm(method: str | None = None) -> Any:
        return get_context("forkserver" if method == "spawn" else method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", warm)
        yield
