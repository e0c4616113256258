"""Runs the commands of README and of pages with predictions, and writes what they print below.

    python docs/console.py

A line of three dots stands for lines that are left out; the lines kept beside it are each
found again by their first word. tests/test_console_docs.py holds the pages to the commands.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    ROOT / name
    for name in (
        "README.md", "docs/index.md", "docs/planner.md", "docs/long_context.md", "docs/adapters.md",
        "docs/rewards.md", "docs/scale.md",
    )
)  # fmt: skip
DOTS = "...\n"
_PREDICTS = r"megatrain estimate|python -m benchmarks\.(?:reach|published)"
_BLOCK = re.compile(rf"```console\n\$ ((?:{_PREDICTS})[^\n]*)\n(.*?)```", re.S)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a page, and what the page says it prints."""
    for match in _BLOCK.finditer(text):
        yield match[1], match[2]


def run(command: str) -> str:
    """Return what a command prints, in an empty folder and without what doctor measured."""
    words = shlex.split(command)
    prefix = [sys.executable, "-m", "megatrain"] if words[0] == "megatrain" else [sys.executable]
    with tempfile.TemporaryDirectory() as folder:
        search = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        environment = os.environ | {"PYTHONPATH": search, "MEGATRAIN_CACHE": folder}
        done = subprocess.run(
            [*prefix, *words[1:]],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode in (0, 3), done.stderr  # 3: it does not fit, and says so
    return done.stdout


def shortened(printed: str, like: str) -> str:
    """Return `printed` with the lines that `like` keeps, if it leaves some out."""
    if DOTS not in like:
        return printed
    lines = {line.split()[0]: line for line in printed.splitlines(True) if line.strip()}
    return "".join(
        line if line == DOTS else lines[line.split()[0]] for line in like.splitlines(True)
    )


def main() -> None:
    for path in PAGES:
        text = _BLOCK.sub(
            lambda m: f"```console\n$ {m[1]}\n{shortened(run(m[1]), m[2])}```", path.read_text()
        )
        path.write_text(text)


if __name__ == "__main__":
    main()
