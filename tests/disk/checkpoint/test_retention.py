"""Laws of retention.py: which checkpoints there are, and which stay."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from megatrain.disk.checkpoint.manifest import MANIFEST_NAME, Manifest
from megatrain.disk.checkpoint.retention import best_of, clear_unfinished, finished, prune
from megatrain.errors import DiskError
from testkit.faulty_os import faulty


def _save(parent: Path, step: int, loss: float | None = None, mark: int = 0) -> Path:
    """Make what looks like a checkpoint."""
    folder = parent / f"step-{step:08}-{mark:08x}"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    made = Manifest(step=step, files={}, model="", training={"eval_loss": loss})
    (folder / MANIFEST_NAME).write_bytes(made.to_bytes())
    return folder


def _unfinished(parent: Path, step: int) -> Path:
    folder = _save(parent, step, mark=0xDEAD)
    (folder / MANIFEST_NAME).unlink()
    return folder


def test_the_newest_comes_first(tmp_path: Path) -> None:
    made = [_save(tmp_path, step) for step in (9, 100_000_000, 10, 2)]
    assert [int(path.name.split("-")[1]) for path in finished(tmp_path)] == [10**8, 10, 9, 2]
    assert set(finished(tmp_path)) == set(made)


def test_of_two_saves_of_a_step_the_later_comes_first(tmp_path: Path) -> None:
    first, second = _save(tmp_path, 4, mark=2), _save(tmp_path, 4, mark=1)
    os.utime(first / MANIFEST_NAME, ns=(0, 1000))
    os.utime(second / MANIFEST_NAME, ns=(0, 2000))
    assert finished(tmp_path) == [second, first]


def test_a_folder_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert finished(tmp_path / "none") == []
    assert clear_unfinished(tmp_path / "none") == []
    assert prune(tmp_path / "none", 1, keep_best=True) == []
    assert best_of(tmp_path / "none") is None


def test_only_the_newest_stay(tmp_path: Path) -> None:
    made = [_save(tmp_path, step) for step in range(1, 6)]
    deleted = prune(tmp_path, 2, keep_best=False)
    assert deleted == [path.name for path in made[:3]]
    assert finished(tmp_path) == made[:2:-1]


def test_the_best_stays_too(tmp_path: Path) -> None:
    losses = [3.0, 1.0, None, 1.0, 2.0]
    made = [_save(tmp_path, step, loss) for step, loss in enumerate(losses, 1)]
    best = best_of(tmp_path)
    assert best is not None
    assert (best.path, best.step, best.eval_loss) == (made[3], 4, 1.0)
    prune(tmp_path, 1, keep_best=True)
    assert finished(tmp_path) == [made[4], made[3]]
    prune(tmp_path, 1, keep_best=False)
    assert finished(tmp_path) == [made[4]]


def test_what_was_just_saved_stays_although_a_later_step_is_there(tmp_path: Path) -> None:
    """A damaged checkpoint was passed over, and the run has not come as far again."""
    damaged, newest = _save(tmp_path, 8), _save(tmp_path, 5)
    (damaged / "model" / "config.json").write_text("junk")
    prune(tmp_path, 1, keep_best=False, newest=newest)
    assert newest in finished(tmp_path)
    prune(tmp_path, 1, keep_best=False)
    assert newest not in finished(tmp_path)  # so much for going by the step alone


def test_a_manifest_that_cannot_be_believed_is_the_best_of_nothing(tmp_path: Path) -> None:
    good, bad = _save(tmp_path, 1, 2.0), _save(tmp_path, 2, 1.0)
    text = (bad / MANIFEST_NAME).read_text()
    (bad / MANIFEST_NAME).write_text(text.replace('"eval_loss": 1.0', '"eval_loss": 0.5'))
    best = best_of(tmp_path)
    assert best is not None
    assert best.path == good


def test_saves_that_never_ended_are_cleared(tmp_path: Path) -> None:
    kept, left = _save(tmp_path, 1), _unfinished(tmp_path, 2)
    assert finished(tmp_path) == [kept]
    assert clear_unfinished(tmp_path) == [left.name]
    assert list(tmp_path.iterdir()) == [kept]


def test_nothing_but_saves_is_touched_and_no_link_is_followed(tmp_path: Path) -> None:
    parent, outside = tmp_path / "checkpoints", tmp_path / "outside"
    for step in (1, 2):
        _save(parent, step)
    precious = _save(outside, 7)
    (precious / MANIFEST_NAME).rename(precious / "kept")
    (parent / "step-00000007-00000000").symlink_to(precious)
    (parent / "notes").mkdir()
    (parent / "step-00000009").mkdir()
    (parent / "step-00000009-0000000g").mkdir()
    inside = parent / "step-00000001-00000000" / "model" / "link"
    inside.symlink_to(outside)
    assert clear_unfinished(parent) == []
    assert prune(parent, 1, keep_best=True) == ["step-00000001-00000000"]
    assert (precious / "kept").exists()
    assert sorted(path.name for path in parent.iterdir()) == [
        "notes", "step-00000002-00000000", "step-00000007-00000000", "step-00000009",
        "step-00000009-0000000g",
    ]  # fmt: skip


@pytest.mark.parametrize("error", [5, 28])
def test_a_failure_at_any_call_of_a_prune_leaves_whole_ones(tmp_path: Path, error: int) -> None:
    for fail_at in range(100):
        parent = tmp_path / str(fail_at)
        made = [_save(parent, step) for step in (1, 2, 3)]
        with faulty(fail_at=fail_at, error=error):
            try:
                prune(parent, 1, keep_best=False)
                break
            except DiskError as failure:
                assert os.strerror(error) in str(failure)  # noqa: PT017
        assert made[2] in finished(parent)
        for folder in finished(parent):  # whole: what is half deleted has no manifest
            assert (folder / "model" / "config.json").exists()
        clear_unfinished(parent)
        prune(parent, 1, keep_best=False)
        assert list(parent.iterdir()) == [made[2]]
    assert fail_at > 10


def test_what_is_set_aside_stays_until_as_many_others_are_as_new_as_are_kept(
    tmp_path: Path,
) -> None:
    made = {step: _save(tmp_path, step) for step in (2, 4, 6)}
    aside = [made[6]]
    made[5] = _save(tmp_path, 5)
    assert prune(tmp_path, 2, keep_best=False, newest=made[5], aside=aside) == [made[2].name]
    made[7] = _save(tmp_path, 7)
    assert prune(tmp_path, 2, keep_best=False, newest=made[7], aside=aside) == [made[4].name]
    assert set(finished(tmp_path)) == {made[5], made[6], made[7]}, (
        "two others count, and it does not"
    )
    made[8] = _save(tmp_path, 8)
    deleted = prune(tmp_path, 2, keep_best=False, newest=made[8], aside=aside)
    assert deleted == [made[5].name, made[6].name]


def test_without_that_word_it_would_take_the_place_of_another(tmp_path: Path) -> None:
    """The sibling: an unreadable checkpoint that counts leaves one that can be read."""
    made = {step: _save(tmp_path, step) for step in (4, 5, 6)}
    assert prune(tmp_path, 2, keep_best=False, newest=made[5]) == [made[4].name]
    as_damaged = prune(tmp_path, 2, keep_best=False, newest=made[5], damaged=[made[6]])
    assert as_damaged == [made[6].name]


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that the system fails to look at, and to read."""
    paths: list[Path] = []
    for name in ("stat", "read_bytes"):
        real = getattr(Path, name)

        def looked(path: Path, *args: Any, _real: Any = real, **options: Any) -> Any:
            if path in paths:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return _real(path, *args, **options)

        monkeypatch.setattr(Path, name, looked)
    return paths


def test_a_save_whose_manifest_cannot_be_looked_at_is_not_cleared_away(
    tmp_path: Path, blind: list[Path]
) -> None:
    made, never_ended = _save(tmp_path, 4), _unfinished(tmp_path, 5)
    blind.append(made / MANIFEST_NAME)
    assert finished(tmp_path) == [made]
    assert clear_unfinished(tmp_path) == [never_ended.name]
    assert made.is_dir()


def test_one_whose_loss_cannot_be_read_now_may_be_the_best(
    tmp_path: Path, blind: list[Path]
) -> None:
    made = {step: _save(tmp_path, step, loss) for step, loss in ((1, 1.0), (2, 9.0), (3, 8.0))}
    blind.append(made[1] / MANIFEST_NAME)
    assert prune(tmp_path, 1, keep_best=True) == [made[2].name]
    blind.clear()
    assert prune(tmp_path, 1, keep_best=True) == []
    assert prune(tmp_path, 1, keep_best=False) == [made[1].name]
