"""Laws of run_folder.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.errors import RunFolderError
from megatrain.trainer.run_folder import RunFolder


def test_two_processes_cannot_share_a_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run"), pytest.raises(RunFolderError, match="another process"):
        RunFolder(tmp_path / "run")
    RunFolder(tmp_path / "run").close()


def test_lines_are_whole_and_in_order(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        assert not folder.has_run
        for step in range(3):
            folder.append("metrics.jsonl", {"step": step, "text": "\ud800 \u00e9\n"})
        assert folder.has_run
    text = (tmp_path / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [0, 1, 2]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be made a run folder"):
        RunFolder(tmp_path / "file" / "run")
