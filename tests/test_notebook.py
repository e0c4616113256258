"""The example notebook: its form, and a run of all its cells that ends with the trained answer.

Its cells are plain Python, so they run one after another as a script, with the random Qwen3 model
of the quick start in place of the published one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_quick_start import ANSWER, write_model

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]


def _faults(text: str) -> list[str]:
    """Return what is wrong with a notebook file, in words."""
    notebook = json.loads(text)
    faults = []
    if (notebook["nbformat"], notebook["nbformat_minor"]) != (4, 5):
        faults.append("not version 4.5")
    if text != json.dumps(notebook, indent=1, ensure_ascii=False) + "\n":
        faults.append("not as Jupyter writes it")
    names = [cell.get("id", "") for cell in notebook["cells"]]
    if len(set(names)) < len(names) or not all(re.fullmatch(r"[\w-]{1,64}", n) for n in names):
        faults.append("ids of cells")
    for cell in notebook["cells"]:
        expected = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            expected |= {"execution_count", "outputs"}
            if cell.get("outputs") or cell.get("execution_count") is not None:
                faults.append(f"{cell['id']}: has outputs")
            try:
                compile("".join(cell["source"]), cell["id"], "exec")
            except SyntaxError:
                faults.append(f"{cell['id']}: not Python")
        if set(cell) != expected:
            faults.append(f"{cell['id']}: keys")
    return faults


def test_the_notebook_is_valid_and_has_no_outputs() -> None:
    assert _faults(NOTEBOOK.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"nbformat_minor": 5', '"nbformat_minor": 4', "not version 4.5"),
        ('"id": "train"', '"id": "rows"', "ids of cells"),
        ('"execution_count": null', '"execution_count": 3', "install: has outputs"),
        ('"import importlib.util', '"%pip install x\\n", "import', "install: not Python"),
        ('"outputs": []', '"output": []', "install: keys"),
    ],
)
def test_a_fault_of_the_file_would_be_noticed(old: str, new: str, fault: str) -> None:
    text = NOTEBOOK.read_text()
    assert old in text
    assert fault in _faults(text.replace(old, new, 1))


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
