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
COMMANDS = [scene["command"] for scene in RECORDING if scene["command"].startswith("megatrain ")]


def _parse(command: str) -> None:
    """Parse a command as the program does, without running it."""
    _, verb, *words = shlex.split(command)
    group: Any = typer.main.get_command(app)
    group.commands[verb].make_context(verb, words)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_tour_exist(command: str) -> None:
    _parse(command)


def test_the_recording_is_of_the_script() -> None:
    said = [(scene.note, scene.command) for scene in TOOL["SCENES"]]
    recorded = [(scene["note"], scene["command"]) for scene in RECORDING]
    assert recorded == said, "run: python docs/tour.py"
