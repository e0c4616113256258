"""The README's commands work as written, and its figures are those of the tests."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch

import megatrain as mt
from tests.families import FAMILIES, save_tiny

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_commands_run(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    searched = [str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(":")]
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join(searched),
        "MEGATRAIN_CACHE": str(tmp_path / "cache"),
    }
    commands = [line for block in _blocks("bash") for line in block.splitlines()]
    installs = [c for c in commands if "venv .venv" in c or "pip install" in c]
    assert len(installs) == 3
    for command in commands:
        if command not in installs:  # the environment of the tests is installed already
            words = shlex.split(
                command.replace(".venv/bin/megatrain", f"{sys.executable} -m megatrain")
            )
            words[0] = sys.executable
            subprocess.run(words, cwd=tmp_path, env=environment, check=True, capture_output=True)


def test_the_python_example_runs(tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "llama", torch.bfloat16)
    (code,) = _blocks("python")
    code = code.replace("path/to/hf-folder", str(tmp_path / "hf"))
    code = code.replace("path/to/export", str(tmp_path / "export"))
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert mt.load_model(tmp_path / "export").store.layout.num_params > 0


def test_the_number_of_families_is_the_tested_one() -> None:
    assert f"| {len(FAMILIES)} | [docs/families.md]" in README
    assert f"Any of {len(FAMILIES)} Hugging Face" in (ROOT / "CHANGELOG.md").read_text()
