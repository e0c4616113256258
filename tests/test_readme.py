"""README and Python page: the example works as written, figures are those of the tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatrain as mt
from testkit.families import FAMILIES, save_tiny

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


EXAMPLES = re.findall(
    r"```python\n([^`]*path/to/hf-folder.*?)```", (ROOT / "docs" / "python.md").read_text(), re.S
)


@pytest.mark.merge
@pytest.mark.parametrize("code", EXAMPLES, ids=["own loop"])
def test_a_python_example_that_loads_and_exports_runs(tmp_path: Path, code: str) -> None:
    save_tiny(tmp_path / "hf", "llama", torch.bfloat16)
    code = code.replace("path/to/hf-folder", str(tmp_path / "hf"))
    code = code.replace("path/to/export", str(tmp_path / "export"))
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert mt.load_model(tmp_path / "export").store.layout.num_params > 0


def test_the_number_of_families_is_the_tested_one() -> None:
    assert f"[{len(FAMILIES)} decoder families](docs/families.md)" in README
    index = (ROOT / "docs" / "index.md").read_text()
    assert f"[{len(FAMILIES)} families](families.md)" in index
