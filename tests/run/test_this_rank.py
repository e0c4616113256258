"""One rank of a run: how it leaves, its cores, its installation, and restarts by its launcher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.errors import Interrupted
from megatrain.optim.native import LIBRARY, load_kernel
from megatrain.ranks.ownership import Owner
from megatrain.ranks.ranks import Alone, RankInfo
from megatrain.run.folder import RunFolder
from megatrain.run.this_rank import (
    Allowance,
    code_digest,
    kernel_name,
    note_launch,
    shares,
    together,
    was_restarted,
)
from tests.ranks.test_launcher import attempt


class Listed:
    """Ranks that note what they are asked to do."""

    owner = Owner(1, 2)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def agree(self, facts: RankInfo) -> list[RankInfo]:
        self.calls.append("agree")
        return [facts, facts]

    def fail(self, error: BaseException) -> None:
        self.calls.append(f"fail: {error}")

    def close(self) -> None:
        self.calls.append("close")

    def __getattr__(self, name: str) -> object:
        raise AssertionError(name)


def test_all_leave_from_a_run_that_has_ended() -> None:
    ranks = Listed()
    with together(ranks):  # type: ignore[arg-type]
        pass
    assert ranks.calls == ["agree", "close"]


def test_a_common_end_on_request_is_no_failure() -> None:
    ranks = Listed()
    with pytest.raises(Interrupted), together(ranks):  # type: ignore[arg-type]
        raise Interrupted("asked")
    assert ranks.calls == ["agree", "close"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_failure_is_told(kind: type[BaseException]) -> None:
    ranks = Listed()
    with pytest.raises(kind), together(ranks):  # type: ignore[arg-type]
        raise kind("my disk")
    assert ranks.calls == ["fail: my disk", "close"]


EIGHT = tuple(range(8))
NODES = {0: frozenset({0, 1, 4, 5}), 1: frozenset({2, 3, 6, 7})}


def _places(*nodes: int | None) -> list[Allowance]:
    return [Allowance(cores=EIGHT, node=node) for node in nodes]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_ranks_have_all_cores_and_none_twice(count: int) -> None:
    found = shares(_places(*[None] * count), {})
    assert sorted(core for part in found for core in part) == list(EIGHT)
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_a_rank_has_cores_near_its_device() -> None:
    assert shares(_places(0, 1, 1, 0), NODES) == [(0, 1), (2, 3), (6, 7), (4, 5)]
    assert shares(_places(0, 0), NODES) == [(0, 1), (4, 5)]


def test_an_unknown_node_means_an_even_share() -> None:
    assert shares(_places(0, None), NODES) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert shares(_places(0, 1), {0: NODES[0], 1: frozenset()}) == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_more_ranks_than_cores_share_all() -> None:
    assert shares([Allowance(cores=(3,), node=None)] * 2, {}) == [(3,), (3,)]


def test_cores_that_were_divided_stay() -> None:
    places = [Allowance(cores=(0, 1, 2), node=None), Allowance(cores=(3,), node=None)]
    assert shares(places, {}) == [(0, 1, 2), (3,)]


@pytest.fixture
def package(tmp_path: Path) -> Callable[[str], Path]:
    def made(name: str) -> Path:
        folder = tmp_path / name
        (folder / "part").mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "part" / "rate.py").write_text("RATE = 1\n")
        return folder

    return made


def test_equal_packages_have_one_digest_wherever_they_are(package: Callable[[str], Path]) -> None:
    first, second = package("first"), package("second")
    (second / "__pycache__").mkdir()
    (second / "__pycache__" / "rate.cpython-311.pyc").write_bytes(b"\0")
    assert code_digest(first) == code_digest(second)


@pytest.mark.parametrize("change", ["byte", "added", "removed", "renamed", "moved bytes"])
def test_any_change_of_the_code_is_another_digest(
    package: Callable[[str], Path], change: str
) -> None:
    first, second = package("first"), package("second")
    rate = second / "part" / "rate.py"
    match change:
        case "byte":
            rate.write_text("RATE = 2\n")
        case "added":
            (second / "part" / "more.py").write_text("")
        case "removed":
            rate.unlink()
        case "renamed":
            rate.rename(rate.with_name("other.py"))
        case "moved bytes":
            (second / "__init__.py").write_text("RATE = 1\n")
            rate.write_text("")
    assert code_digest(first) != code_digest(second)


def test_the_kernel_is_known_by_its_bytes(tmp_path: Path) -> None:
    library = tmp_path / LIBRARY.name
    assert kernel_name(library) == "torch", "there is none"
    copy = tmp_path / "copy" / LIBRARY.name
    copy.parent.mkdir()
    copy.write_bytes(LIBRARY.read_bytes())
    assert kernel_name(copy) == kernel_name(LIBRARY)
    assert load_kernel(LIBRARY).description.split()[0] == kernel_name(LIBRARY).split(",")[0]
    other = tmp_path / "other" / LIBRARY.name
    other.parent.mkdir()
    other.write_bytes(LIBRARY.read_bytes() + b"\0")
    assert kernel_name(other) != kernel_name(LIBRARY)


class Second(Alone):
    """Rank 1 of two, which hears what rank 0 has decided."""

    owner = Owner(1, 2)

    def __init__(self, decision: bool) -> None:
        self._decision = decision

    def agree(self, facts: RankInfo) -> list[RankInfo]:
        return [dict.fromkeys(facts, self._decision), facts]


def test_only_the_launch_that_began_a_run_resumes_it(tmp_path: Path) -> None:
    own, other = "1_a", "1_b"
    with RunFolder(tmp_path / "run") as folder:
        assert not was_restarted(folder.path, environment=attempt(own, 1))  # it did not begin
        note_launch(folder, attempt(own, 0))
        assert not was_restarted(folder.path, environment=attempt(own, 0))
        assert was_restarted(folder.path, environment=attempt(own, 1))
        assert not was_restarted(folder.path, environment=attempt(other, 1))
        note_launch(folder, attempt(own, 1))  # it resumed
        assert not was_restarted(folder.path, environment=attempt(own, 1))  # a second command
        assert was_restarted(folder.path, environment=attempt(own, 2))


@pytest.mark.parametrize("decision", [True, False])
def test_rank_0_decides_for_all(decision: bool, tmp_path: Path) -> None:
    assert was_restarted(tmp_path, Second(decision)) is decision


@pytest.mark.parametrize("environment", [{}, {"TORCHELASTIC_RESTART_COUNT": "3"}])
def test_without_a_launcher_nothing_is_noted(tmp_path: Path, environment: dict[str, str]) -> None:
    with RunFolder(tmp_path / "run") as folder:
        note_launch(folder, environment)
        assert not was_restarted(folder.path, environment=environment)
        assert not (folder.path / ".launch").exists()
