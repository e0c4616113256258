"""A program whose child processes cannot start is told so, and does not wait for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testkit.patience import HANG_S


@pytest.mark.merge
@pytest.mark.parametrize("guarded", [False, True])
def test_a_script_that_cannot_be_imported_is_told_what_to_change(
    guarded: bool, tmp_path: Path
) -> None:
    lines = [
        "from megatrain.data.tokens.children import require_children",
        "if __name__ == '__main__':" if guarded else "if True:",
        "    require_children()",
    ]
    script = tmp_path / "script.py"
    script.write_text("\n".join(lines))
    ended = _run(script)
    told = "put its code under `if __name__" in ended.stderr
    assert (ended.returncode == 0, told) == (guarded, not guarded), ended.stderr
    assert "bootstrapping phase" not in ended.stderr, "Python's own explanation has 40 lines"


@pytest.mark.merge
def test_a_child_that_cannot_start_for_another_reason_shows_its_output(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from megatrain.data.tokens.children import require_children\n"
        "if __name__ != '__main__':\n    raise ValueError('of my own')\n"
        "require_children()\n"
    )
    ended = _run(script)
    assert "ValueError: of my own" in ended.stderr
    assert "its output is above" in ended.stderr


def _run(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script)],
        env={"PYTHONPATH": str(Path(__file__).parents[3] / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
