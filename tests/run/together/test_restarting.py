"""A restart resumes what its own launch has begun."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.run.folder import RunFolder
from megatrain.run.together.restarting import note_launch, was_restarted

FIRST = {"TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_RESTART_COUNT": "0"}
AGAIN = FIRST | {"TORCHELASTIC_RESTART_COUNT": "1"}


def test_only_the_launch_that_began_a_run_resumes_it(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        assert not was_restarted(folder.path, AGAIN)  # it was refused, and did not begin
        note_launch(folder, FIRST)
    assert was_restarted(folder.path, AGAIN)
    assert not was_restarted(folder.path, FIRST)
    assert not was_restarted(folder.path, AGAIN | {"TORCHELASTIC_RUN_ID": "two"})


@pytest.mark.parametrize("environment", [{}, {"TORCHELASTIC_RESTART_COUNT": "3"}])
def test_without_a_launcher_nothing_is_noted(tmp_path: Path, environment: dict[str, str]) -> None:
    with RunFolder(tmp_path / "run") as folder:
        note_launch(folder, environment)
        assert not was_restarted(folder.path, environment)
        assert not (folder.path / ".launch").exists()
