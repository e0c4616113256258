"""Runs on data that is read in chunks end in the same bits, however often they are stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.data.chunks import chunks, row_chunks, token_files
from megatrain.data.steps import chunk_windows
from megatrain.data.tokens import prepare
from megatrain.errors import Interrupted
from testkit.runs import Setting, config_of, lines_of, run, unequal

pytestmark = pytest.mark.merge
SETTING = Setting(eval_every=4, save_every=2)


def _source(world: Path, folder: Path, kind: str) -> dict[str, Any]:
    if kind == "rows":
        return {"train": str(world / "rows.jsonl"), "prepare": "during"}
    ids = np.random.default_rng(0).integers(2, 200, 20_000).astype(np.uint16)
    ids[::37] = 1
    ids.tofile(folder / "tokens.bin")
    return {"train": {"path": str(folder / "tokens.bin"), "dtype": "uint16"}}


@pytest.mark.parametrize("kind", ["tokens", "rows"])
def test_a_stopped_run_ends_as_one_that_was_not(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})  # no other processes
    monkeypatch.setattr(prepare, "probe_template", lambda *arguments: None)
    monkeypatch.setattr(token_files, "_CHUNK_TOKENS", 64)
    monkeypatch.setattr(row_chunks, "_CHUNK_BYTES", 300)
    for module in (chunks, chunk_windows):
        monkeypatch.setattr(module, "WINDOW_CHUNKS", 4)  # several windows in nine steps

    def config(folder: str) -> Any:
        return config_of(
            world, tmp_path / folder, SETTING, data=_source(world, tmp_path, kind),
            eval={"max_rows": 4},
        )  # fmt: skip

    whole = run(config("whole"))
    for stop in (3, 6):
        with pytest.raises(Interrupted):
            run(config("stopped"), resume=stop > 3, stop=stop)
    ended = run(config("stopped"), resume=True)
    assert unequal(ended, whole) == []
    assert lines_of(tmp_path / "stopped") == lines_of(tmp_path / "whole")
    steps = [line for line in lines_of(tmp_path / "whole") if "loss" in line]
    assert len({line["loss"] for line in steps}) == len(steps)
