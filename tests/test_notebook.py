"""The example notebook: all of its cells, from an empty environment and a local index.

Its cells are plain Python, so they run one after another as a script. They install MegaTrain from a
wheel of this tree, in an environment that sees the packages of the tests besides. The model is the
random Qwen3 of the quick start, the card that of testkit/host_gpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from proofs.bare_root import build
from tests.test_commands import ROOT
from tests.test_quick_start import write_model

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
PACKAGES = sysconfig.get_path("purelib")
ON_HOST_GPU = {
    "NOTEBOOK_PROGRAM": "testkit.host_gpu",
    "NOTEBOOK_DEVICE": "hostgpu",
    "NOTEBOOK_CARD_GB": "0.4",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, the index, and an environment without MegaTrain."""
    if any(found.name == "megatrain" for found in distributions(path=[PACKAGES])):
        pytest.skip("MegaTrain is among the packages of the tests: run this by `bash .ci/run`")
    folder = tmp_path_factory.mktemp("notebook")
    write_model(folder / "qwen")
    (folder / "made").mkdir()
    (folder / "index").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", "/bin/false")  # the kernel's own build is in tests/optim/test_build.py
        wheel = build(folder / "made")[1]
    wheel.rename(folder / "index" / wheel.name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (own,) = (folder / "env" / "lib").glob("python3*/site-packages")
    (own / "tests.pth").write_text(f"{PACKAGES}\n")
    return folder


def _run(
    code: str, place: Path, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a folder, as a process of the environment."""
    environment = {name: value for name, value in os.environ.items() if name[:4] != "PIP_"} | {
        "MEGATRAIN_CACHE": str(folder / "cache"),
        "MPLBACKEND": "agg",
        "NOTEBOOK_MODELS": str(place / "qwen"),
        "PIP_FIND_LINKS": str(place / "index"),
        "PIP_NO_INDEX": "1",
        "PYTHONPATH": str(ROOT),  # for testkit; the package is in src, and not seen
        **variables,
    }
    return subprocess.run(
        [place / "env" / "bin" / "python", "-c", code],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def _code(*, until: str | None = None) -> str:
    """Return the code cells as a script, up to and with the one called `until`."""
    names = [cell["id"] for cell in CELLS]
    cells = CELLS if until is None else CELLS[: names.index(until) + 1]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.hostgpu
@pytest.mark.merge
def test_the_notebook_proves_its_claim_and_ends_with_an_issue(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("testkit.host_gpu", exc_type=ImportError)
    done = _run(_code(), place, tmp_path, **ON_HOST_GPU)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
    proved, _, trained = done.stdout.partition("step 40/40")
    assert "streamed = resident on hostgpu: " in proved
    assert "GB if it stays on the card, of 0.4 GB; streamed: fits" in proved
    assert "4 of 4" in trained
    assert "Please open an issue" in trained
    assert "in full, 0.4" in trained
    assert json.loads((tmp_path / "doctor-gpu.json").read_text())["device"].startswith("hostgpu")


@pytest.mark.merge
def test_a_card_that_holds_the_model_proves_nothing(place: Path, tmp_path: Path) -> None:
    done = _run(_code(until="choose"), place, tmp_path, NOTEBOOK_DEVICE="cpu")
    assert done.returncode == 1
    assert "streamed = resident on cpu: " in done.stdout
    assert "No model of the list fits host memory and exceeds the card." in done.stdout
    assert "lower CARD_GB, or take a runtime with more memory" in done.stderr


@pytest.mark.merge
def test_a_command_that_fails_ends_the_notebook(place: Path, tmp_path: Path) -> None:
    code = _code(until="commands").replace('megatrain("--version")', 'megatrain("--no-such")')
    done = _run(code, place, tmp_path)
    assert done.returncode == 1
    assert "megatrain ended with exit code 2" in done.stderr


def test_the_first_line_tells_what_is_known_and_what_is_not() -> None:
    first = CELLS[0]["source"][0]
    assert first.startswith("**Known: ")
    assert "Not known: " in first
