"""Every figure of the pages below comes from a command in their text: run it, and it says the same.

A block of kind `console` holds commands behind `$` and what they print; a line of three dots stands
for lines that are left out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("planner.md", "scale.md")


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a page, and what it should print."""
    for block in re.findall(r"```console\n(.*?)```", text, re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, printed = part.partition("\n")
            yield command, printed


def agrees(printed: str, expected: str) -> bool:
    """Return whether the pieces of `expected` between lines of dots come in this order."""
    pieces = [re.escape(piece) for piece in re.split(r"^\.\.\.\n", expected, flags=re.M)]
    return re.fullmatch("(?s)" + ".*".join(pieces), printed) is not None


CASES = [
    pytest.param(command, printed, id=f"{page}-{number}")
    for page in PAGES
    for number, (command, printed) in enumerate(commands((ROOT / "docs" / page).read_text()))
]


def run(command: str, folder: Path) -> str:
    words = shlex.split(command)
    prefix = [sys.executable, "-m", "megatrain"] if words[0] == "megatrain" else [sys.executable]
    search = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    environment = os.environ | {"PYTHONPATH": search, "MEGATRAIN_CACHE": str(folder)}
    done = subprocess.run(
        [*prefix, *words[1:]], cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stderr
    return done.stdout


@pytest.mark.parametrize(("command", "printed"), CASES)
def test_commands_print_what_the_page_says(command: str, printed: str, tmp_path: Path) -> None:
    found = run(command, tmp_path)
    assert agrees(found, printed), f"{command} printed\n{found}"
    assert max(map(len, found.splitlines())) <= 80


def test_each_page_has_commands() -> None:
    for page in PAGES:
        assert len(list(commands((ROOT / "docs" / page).read_text()))) >= 3, page


def test_another_figure_would_be_noticed() -> None:
    assert agrees("a 1\nb 2\nc 3\n", "a 1\n...\nc 3\n")
    assert agrees("a 1\nb 2\n", "a 1\nb 2\n")
    assert not agrees("a 1\nb 2\nc 3\n", "a 1\n...\nc 4\n")
    assert not agrees("a 1\nb 2\n", "a 1\n")
