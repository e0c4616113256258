"""A restart resumes what its own launch has begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.ranks.meeting import LOOPBACK, serve
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import Alone, Said
from megatrain.run.folder import RunFolder
from megatrain.run.together import restarting
from megatrain.run.together.restarting import note_launch, was_restarted
from tests.ranks.test_launcher import environment_of


def attempt(launch: Any, number: int) -> dict[str, str]:
    return environment_of(launch.port) | {"TORCHELASTIC_RESTART_COUNT": str(number)}


@pytest.fixture
def launches() -> list[Any]:
    """Stores of two launchers that were given the same id."""
    return [serve(LOOPBACK, 0, 60.0) for _ in range(2)]


class Second(Alone):
    """Rank 1 of two, which hears what rank 0 has decided."""

    owner = Owner(1, 2)

    def __init__(self, decision: bool) -> None:
        self._decision = decision

    def agree(self, facts: Said) -> list[Said]:
        return [dict.fromkeys(facts, self._decision), facts]


def test_only_the_launch_that_began_a_run_resumes_it(tmp_path: Path, launches: list[Any]) -> None:
    own, other = launches
    with RunFolder(tmp_path / "run") as folder:
        assert not was_restarted(folder.path, environment=attempt(own, 1))  # it did not begin
        note_launch(folder, attempt(own, 0))
        assert not was_restarted(folder.path, environment=attempt(own, 0))
        assert was_restarted(folder.path, environment=attempt(own, 1))
        assert not was_restarted(folder.path, environment=attempt(other, 1))
        note_launch(folder, attempt(own, 1))  # it resumed
        assert not was_restarted(folder.path, environment=attempt(own, 1))  # a second command
        assert was_restarted(folder.path, environment=attempt(own, 2))


def test_a_name_that_is_the_id_would_be_that_of_another_launch(
    tmp_path: Path, launches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sibling."""
    monkeypatch.setattr(restarting, "launch_name", lambda given: given["TORCHELASTIC_RUN_ID"])
    with RunFolder(tmp_path / "run") as folder:
        note_launch(folder, attempt(launches[0], 0))
        assert was_restarted(folder.path, environment=attempt(launches[1], 1))


@pytest.mark.parametrize("decision", [True, False])
def test_rank_0_decides_for_all(decision: bool, tmp_path: Path) -> None:
    assert was_restarted(tmp_path, Second(decision)) is decision


@pytest.mark.parametrize("environment", [{}, {"TORCHELASTIC_RESTART_COUNT": "3"}])
def test_without_a_launcher_nothing_is_noted(tmp_path: Path, environment: dict[str, str]) -> None:
    with RunFolder(tmp_path / "run") as folder:
        note_launch(folder, environment)
        assert not was_restarted(folder.path, environment=environment)
        assert not (folder.path / ".launch").exists()
