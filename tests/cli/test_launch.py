"""Ranks of this host, started by `megatrain train --gpus N`."""

from __future__ import annotations

import pytest

from megatrain.cli import launch as launching
from megatrain.cli.launch import exit_code, without_option
from megatrain.errors import NoDevice


@pytest.mark.parametrize(
    "words",
    [
        ["train", "run.yaml", "--gpus", "2", "train.epochs=2", "--resume"],
        ["train", "--gpus=2", "run.yaml", "train.epochs=2", "--resume"],
        ["train", "run.yaml", "train.epochs=2", "--resume", "--gpus", "2"],
    ],
)
def test_all_other_words_are_passed_on(words: list[str]) -> None:
    assert without_option(words, "--gpus") == ["train", "run.yaml", "train.epochs=2", "--resume"]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([4, 6, 6], 4),
        ([6, 4], 4),  # a rank may notice before the one that failed has ended
        ([130, 130], 130),
        ([-9, 6, 6], 6),
        ([-9, -15], 6),
        ([1, -15], 1),
    ],
)
def test_the_code_is_that_of_the_rank_that_failed_by_itself(
    codes: list[int], expected: int
) -> None:
    assert exit_code(codes) == expected


def test_ranks_without_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "num_accelerators", lambda: 2)
    with pytest.raises(NoDevice, match=r"--gpus 3: torch finds 2 devices.*memory\.device=cpu"):
        launching.launch(3, [], "auto")
