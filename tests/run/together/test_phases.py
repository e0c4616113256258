"""Ranks wait for one that is busy, and find what makers made."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megatrain.ranks.ranks import ALONE, Ranks, Said
from megatrain.run.together import phases
from testkit.rank_threads import Together


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "PULSE_S", 0.01)


def test_all_return_once_all_are_done() -> None:
    others, signs = threading.Semaphore(0), []

    def work(ranks: Ranks) -> bool:
        agree = ranks.agree

        def counted(facts: Said) -> list[Said]:
            if ranks.owner.leads:
                signs.append(facts)
                if len(signs) > 5:  # so often does a busy rank say that it lives
                    others.release()
            return agree(facts)

        ranks.agree = counted  # type: ignore[method-assign]
        return phases.unhurried(ranks, lambda: not ranks.owner.leads or others.acquire())

    assert Together(3).run(work) == [True, True, True]
    assert len(signs) > 5


def test_a_process_alone_just_works() -> None:
    assert phases.unhurried(ALONE, lambda: 7) == 7
    assert phases.per_host(ALONE, lambda: 7) == 7
    assert phases.per_folder(ALONE, Path("/nowhere"), lambda: 7) == 7


def test_a_rank_that_fails_raises_its_own_error() -> None:
    def work(ranks: Ranks) -> None:
        def fails() -> None:
            if ranks.owner.rank == 1:
                raise ValueError("mine")

        phases.unhurried(ranks, fails)
        ranks.agree({})

    with pytest.raises(ValueError, match="mine"):
        Together(2).run(work)


def _made(size: int, hosts: list[str], caches: list[Path], patch: pytest.MonkeyPatch) -> list[str]:
    """Return what ranks found, of those that look into a folder, and make it if it is not there."""
    here = threading.local()
    patch.setattr("socket.gethostname", lambda: hosts[here.rank])

    def work(ranks: Ranks) -> str:
        here.rank = ranks.owner.rank
        folder = caches[ranks.owner.rank]

        def find() -> str:
            if (folder / "rows").exists():
                return "found"
            (folder / "rows").write_text("rows")
            return "made"

        return phases.per_folder(ranks, folder, find)

    return Together(size).run(work)


@pytest.mark.parametrize(
    ("hosts", "caches", "expected"),
    [
        ("aaa", "xxx", ["made", "found", "found"]),
        ("aabb", "xxxx", ["made", "found", "found", "found"]),
        ("aabb", "xxyy", ["made", "found", "made", "found"]),
    ],
    ids=["one host", "a shared cache", "a cache each"],
)
def test_one_rank_makes_for_all_that_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: str, caches: str, expected: list[str]
) -> None:
    folders = [tmp_path / name for name in caches]
    for folder in set(folders):
        folder.mkdir()
    assert _made(len(hosts), list(hosts), folders, monkeypatch) == expected
    assert {path.name for folder in folders for path in folder.iterdir()} == {"rows"}
