"""The tour of the README: its commands are those of the program, and the picture is small."""

from __future__ import annotations

import json
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from megatrain.cli.app import app

DOCS = Path(__file__).parents[1] / "docs"
TOOL: dict[str, Any] = runpy.run_path(str(DOCS / "tour.py"))
RECORDING: list[dict[str, str]] = json.loads((DOCS / "tour.json").read_text())
PICTURE = (DOCS / "tour.svg").read_text()
COMMANDS = [scene["command"] for scene in RECORDING if scene["command"].startswith("megatrain ")]


def _parse(command: str) -> None:
    """Parse a command as the program does, without running it."""
    _, verb, *words = shlex.split(command)
    group: Any = typer.main.get_command(app)
    group.commands[verb].make_context(verb, words)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_tour_exist(command: str) -> None:
    _parse(command)


@pytest.mark.parametrize(
    ("command", "fault"),
    [("megatrain trian run.yaml", "trian"), ("megatrain verify runs --quickly", "No such option")],
)
def test_a_command_that_is_gone_would_be_noticed(command: str, fault: str) -> None:
    with pytest.raises(Exception, match=fault):
        _parse(command)


def test_the_recording_is_of_the_script() -> None:
    said = [(scene.note, scene.command) for scene in TOOL["SCENES"]]
    recorded = [(scene["note"], scene["command"]) for scene in RECORDING]
    assert recorded == said, "run: python docs/tour.py"


def test_the_picture_is_small_and_plays_without_scripts() -> None:
    assert len(PICTURE) < 300_000
    assert "<script" not in PICTURE
    assert "href" not in PICTURE
    assert TOOL["WIDE"] <= 800, "GitHub shows 800 pixels without shrinking them"


def test_it_takes_less_than_half_a_minute_and_ends_with_a_pause() -> None:
    lines = TOOL["shown"](RECORDING)
    whole_s = lines[-1].at_s + TOOL["LOOKING_S"] + TOOL["END_S"]
    assert 15 <= whole_s <= 30
    assert f"{whole_s:.1f}s infinite" in PICTURE
    assert all(len(line.text.plain) <= TOOL["COLUMNS"] for line in lines)


def test_its_first_picture_is_a_command_with_its_answer() -> None:
    first = [line for line in TOOL["shown"](RECORDING) if line.at_s == 0.0]
    assert [line.kind for line in first[:3]] == ["said", "typed", "printed"]
    assert first[2].text.plain.startswith("fits: ")
