"""A run folder that not all ranks see is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.errors import RunFolderError
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.together.sight import require_seen, seen
from testkit.rank_threads import Together


def test_all_see_one_folder(tmp_path: Path) -> None:
    assert Together(3).run(lambda ranks: seen(ranks, tmp_path)) == [[True] * 3] * 3
    Together(2).run(lambda ranks: require_seen(ranks, tmp_path))
    require_seen(ALONE, tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_see_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    texts = []

    def work(ranks: Ranks) -> None:
        folder = tmp_path / ("other" if ranks.owner.rank == 2 else "run")
        with pytest.raises(RunFolderError) as failure:
            require_seen(ranks, folder)
        texts.append(str(failure.value))

    Together(3).run(work)
    assert len(texts) == 3
    assert all("rank 2 on" in text and "file system that all hosts share" in text for text in texts)
