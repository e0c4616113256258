"""A folder that turns hostile after it was loaded, or where nobody looked, and is exported to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatrain import load_model
from tests.attacks.folders import SHAPES, write_benign, write_index
from tests.attacks.sandbox import LOADED, Outcome, Sandbox

INDEX = "model.safetensors.index.json"


def _export(folder: Path, to: str, spoil: Any) -> Outcome:
    """Load a benign folder, spoil it, and export it."""

    def play(folder: Path) -> None:
        model = load_model(folder)
        spoil(folder)
        model.export(folder / to)

    folder.mkdir()
    write_benign(folder)
    (folder.parent / "secret").write_text("private")
    with Sandbox(play) as sandbox:
        return sandbox.attack(folder)


def _escaping_map(folder: Path) -> None:
    write_index(folder, {"weight_map": dict.fromkeys(SHAPES, "../secret")})


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: os.mkfifo(folder / INDEX),
        lambda folder: (folder / INDEX).symlink_to("/dev/zero"),
        lambda folder: (folder / INDEX).symlink_to("../secret"),
        lambda folder: write_index(folder, b"[" * 10_000),
        _escaping_map,
    ],
    ids=["pipe", "device", "link out", "deep", "map that escapes"],
)
def test_an_index_that_nobody_read_does_not_stop_an_export(spoil: Any, tmp_path: Path) -> None:
    outcome = _export(tmp_path / "model", ".", spoil)
    assert outcome.end == LOADED, outcome.text
    assert (tmp_path / "secret").read_text() == "private"
    assert not (tmp_path / "model" / INDEX).is_symlink()
    load_model(tmp_path / "model")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: (folder / "tokenizer.json").symlink_to("../secret"),
        lambda folder: (folder / "vocab.json").symlink_to("/proc/self/environ"),
        lambda folder: os.mkfifo(folder / "chat_template.jinja"),
    ],
    ids=["link out", "this process", "pipe"],
)
def test_a_private_file_is_not_published(spoil: Any, tmp_path: Path) -> None:
    """What goes with a model was read when it was loaded; links made since are not looked at."""
    outcome = _export(tmp_path / "model", "export", spoil)
    assert outcome.end == LOADED, outcome
    assert all(
        b"private" not in path.read_bytes() for path in (tmp_path / "model" / "export").iterdir()
    )


def test_a_file_that_links_out_while_it_is_written_is_replaced(tmp_path: Path) -> None:
    outcome = _export(
        tmp_path / "model",
        ".",
        lambda folder: [
            (folder / name).unlink() or (folder / name).symlink_to("../secret")
            for name in ("config.json", "model.safetensors")
        ],
    )
    assert outcome.end == LOADED, outcome.text
    assert (tmp_path / "secret").read_text() == "private"
    load_model(tmp_path / "model")
