"""`megatrain data`: the rows of a file, or of a run as the run would train on them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli.demo import write_demo
from testkit.patience import HANG_S
from testkit.warm_python import warm_python


def look(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "MEGATRAIN_CACHE": str(folder / "cache")}
    return subprocess.run(
        [*warm_python().command, "-m", "megatrain", "data", *words],
        capture_output=True, text=True, cwd=folder, env=environment, timeout=HANG_S, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_demo(folder / "d", num_steps=2)
    return folder


def _write(path: Path, *contents: tuple[str, str]) -> Path:
    rows: list[dict[str, Any]] = [{"prompt": p, "completion": c} for p, c in contents]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.merge
def test_a_config_shows_the_rows_of_its_run(demo: Path) -> None:
    """Format, lengths and trained tokens are those of the run: here answers, then everything."""
    done = look(demo, "d/demo.yaml", "--samples", "1")
    assert done.returncode == 0, done.stderr
    assert "{+" in done.stdout
    everything = look(demo, "d/demo.yaml", "data.train_on=all", "--samples", "1")
    assert "--- document 0: 10 tokens, 10 trained" in everything.stdout
    assert "--- document 0: 10 tokens, 2 trained" in done.stdout


def test_a_config_names_its_model_and_a_file_does_not(demo: Path) -> None:
    for words, text in (
        (("d/demo.yaml", "-m", "d/model"), "d/demo.yaml names its model"),
        (("d/rows.jsonl",), "-m is missing"),
        (("d/rows.jsonl", "data.train_on=all", "-m", "d/model"), "data.train_on=all: settings"),
    ):
        done = look(demo, *words)
        assert done.returncode == 2
        assert text in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "instead"),
    [
        ("--max-length", "10", "Give data.max_length=... behind it"),
        ("--train-on", "assistant", "Give data.train_on=... behind it"),
        ("--chat-template", "none", "Give data.chat_template=... behind it"),
        ("--media", "pictures", "Give data.media=... behind it"),
        ("--format", "alpaca", "Give data.train={path: ..., format: ...} behind it"),
        ("--split", "test", "Give data.train={path: ..., split: ...} behind it"),
        ("--rows", "5", "Give data.train={path: ..., rows: ...} behind it"),
    ],
)
def test_an_option_for_rows_is_refused_behind_a_config(
    demo: Path, option: str, value: str, instead: str
) -> None:
    """It would be dropped in silence: the rows shown would not be those that were asked for."""
    done = look(demo, "d/demo.yaml", option, value)
    assert done.returncode == 2
    assert f"{option} is for a file of rows" in done.stderr
    assert instead in done.stderr


@pytest.mark.merge
def test_rows_that_a_run_would_refuse_are_an_error_behind_the_preview(demo: Path) -> None:
    rows = _write(demo / "long.jsonl", ("1 + 1", "2"), ("2" * 90, "3"))
    done = look(demo, rows.name, "-m", "d/model", "--max-length", "64")
    assert done.returncode == 4
    assert "--- document 0" in done.stdout
    assert "1 of 2 rows would be dropped" in done.stderr
    assert look(demo, rows.name, "-m", "d/model", "--max-length", "128").returncode == 0


@pytest.mark.merge
def test_no_control_sequence_of_a_row_is_printed(demo: Path) -> None:
    rows = _write(demo / "ansi.jsonl", ("hi \x1b[31mRED\x1b]0;pwned\x07 \x1b[2J", "\u202eok"))
    done = look(demo, rows.name, "-m", "d/model")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert r"hi \x1b[31mRED\x1b]0;pwned\x07 \x1b[2J" in done.stdout
