"""The example notebook: its form, and a run of all its cells that ends with the trained answer.

Its cells are plain Python, so they run one after another as a script, with the random Qwen3 model
of the quick start in place of the published one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_quick_start import ANSWER, write_model

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]


def _run(code: str, folder: Path, model: str) -> subprocess.CompletedProcess[str]:
    """Run code in a folder, in a process of its own."""
    searched = os.environ.get("PYTHONPATH", "").split(":")
    environment = os.environ | {
        "MEGATRAIN_CACHE": str(folder / "cache"),
        "MPLBACKEND": "agg",
        "NOTEBOOK_MODEL": model,
        "PYTHONPATH": ":".join(str(Path(part).resolve()) for part in searched),
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def _code(*, until: str | None = None) -> str:
    """Return the code cells as a script, up to and with the one called `until`."""
    names = [cell["id"] for cell in CELLS]
    cells = CELLS if until is None else CELLS[: names.index(until) + 1]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.merge
def test_the_notebook_ends_with_the_trained_answer(tmp_path: Path) -> None:
    write_model(tmp_path / "qwen")
    done = _run(_code(), tmp_path, str(tmp_path / "qwen"))
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
    before, _, after = done.stdout.partition("step 40/40")
    assert before.count(ANSWER) == 1, "the preview of the rows"
    assert f"{ANSWER}\n" in after
    assert "4 of 4" in after
    assert (tmp_path / "keeper" / "model.safetensors").exists()


def test_a_command_that_fails_ends_the_notebook(tmp_path: Path) -> None:
    code = _code(until="commands").replace('megatrain("--version")', 'megatrain("--no-such")')
    done = _run(code, tmp_path, "nothing")
    assert done.returncode == 1
    assert "megatrain ended with exit code 2" in done.stderr
