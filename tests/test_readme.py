"""The README's example works as written, and its figures are those of the tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

import megatrain as mt
from testkit.families import FAMILIES, save_tiny

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


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
