"""The interface of ranks: they wait for one that is busy, and differ in nothing that matters."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import ConfigError, RunFolderError
from megatrain.ranks.ranks import ALONE, RankInfo, Ranks
from testkit.rank_threads import Together


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.ranks.ranks.PULSE_S", 0.01)


def test_all_return_once_all_are_done() -> None:
    others, signs = threading.Semaphore(0), []

    def work(ranks: Ranks) -> bool:
        agree = ranks.agree

        def counted(facts: RankInfo) -> list[RankInfo]:
            if ranks.owner.leads:
                signs.append(facts)
                if len(signs) > 5:  # so often does a busy rank say that it lives
                    others.release()
            return agree(facts)

        ranks.agree = counted  # type: ignore[method-assign]
        return ranks.long_work(lambda: not ranks.owner.leads or others.acquire())

    assert Together(3).run(work) == [True, True, True]
    assert len(signs) > 5


def test_a_rank_that_fails_raises_its_own_error() -> None:
    def work(ranks: Ranks) -> None:
        def fails() -> None:
            if ranks.owner.rank == 1:
                raise ValueError("mine")

        ranks.long_work(fails)
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

        return ranks.once_per_folder(folder, find)

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


def _refusals(facts: list[dict[str, Any]]) -> list[str]:
    texts: list[str] = []

    def work(ranks: Ranks) -> None:
        with pytest.raises(ConfigError) as failure:
            ranks.require_same(lambda: facts[ranks.owner.rank])
        texts.append(str(failure.value))

    Together(len(facts)).run(work)
    return texts


def test_a_difference_is_named_on_all_ranks() -> None:
    first, second, third = _refusals([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2}])
    assert first == second == third
    assert "\n  b: 2 on ranks 0, 2; 3 on rank 1\n" in first
    assert "a:" not in first


def test_all_see_one_folder(tmp_path: Path) -> None:
    Together(3).run(lambda ranks: ranks.require_shared(tmp_path))
    ALONE.require_shared(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_see_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    texts = []

    def work(ranks: Ranks) -> None:
        folder = tmp_path / ("other" if ranks.owner.rank == 2 else "run")
        with pytest.raises(RunFolderError) as failure:
            ranks.require_shared(folder)
        texts.append(str(failure.value))

    Together(3).run(work)
    assert len(texts) == 3
    assert all("rank 2 on" in text and "file system that all hosts share" in text for text in texts)
    assert all("MEGATRAIN_CACHE, if save.dir is a URL" in text for text in texts)


def test_rank_0_decides_and_acts() -> None:
    def work(ranks: Ranks) -> tuple[list[int] | None, int | None]:
        own = ranks.owner.rank + 7
        return ranks.decide(lambda: [own]), ranks.on_first(lambda: own)

    assert Together(3).run(work) == [([7], 7), ([7], None), ([7], None)]
    assert (ALONE.decide(lambda: [7]), ALONE.on_first(lambda: 7)) == ([7], 7)


def test_the_first_rank_of_each_host_works_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    monkeypatch.setattr("socket.gethostname", lambda: "aabb"[here.rank])
    worked: list[int] = []

    def work(ranks: Ranks) -> list[int]:
        here.rank = ranks.owner.rank
        ranks.on_each_host(lambda: worked.append(ranks.owner.rank))
        return ranks.neighbors()

    assert Together(4).run(work) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert sorted(worked) == [0, 2]
    ALONE.on_each_host(lambda: worked.append(9))
    assert worked[-1] == 9
