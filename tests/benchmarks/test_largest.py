"""The largest model under a limit: the search, the ladder, the limit and the verdict."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.control_group import limited_group, memory_groups
from benchmarks.rivals.climbing import highest_rung
from benchmarks.rivals.ladder import Ladder
from benchmarks.rivals.largest import CLIMBERS, attempt, judge, ratios

TINY = Ladder(hidden=32, intermediate=64, heads=2, key_heads=1, head_dim=16, vocabulary=320)
MIB = 1 << 20
GROUPS = memory_groups()
needs_groups = pytest.mark.skipif(GROUPS is None, reason="no control group can be made here")


class Machine:
    """Holds every rung up to its own, and counts trials."""

    def __init__(self, highest: int) -> None:
        self.highest = highest
        self.tried: list[int] = []

    def holds(self, rung: int) -> bool:
        assert rung >= 0
        assert rung not in self.tried
        self.tried.append(rung)
        return rung <= self.highest


@pytest.mark.parametrize("guess", [-3, 0, 1, 7, 30, 63])
def test_the_search_finds_the_highest_rung_from_any_guess(guess: int) -> None:
    for highest in range(40):
        machine = Machine(highest)
        assert highest_rung(machine.holds, guess) == highest
        assert len(machine.tried) <= 14
    assert highest_rung(Machine(-1).holds, guess) is None


def test_a_good_guess_needs_two_trials_and_a_near_one_three() -> None:
    for guess, trials in ((20, 2), (21, 2), (19, 3), (22, 3)):
        machine = Machine(20)
        assert highest_rung(machine.holds, guess) == 20
        assert len(machine.tried) == trials


def test_rungs_grow_by_a_few_percent_once_a_layer_is_small() -> None:
    ladder = Ladder()
    growths = [ladder.params(rung + 1) / ladder.params(rung) for rung in range(10, 50)]
    assert min(growths) > 1.04
    assert max(growths) < 1.1
    assert ladder.rung_below(ladder.params(17)) == 17
    assert ladder.rung_below(ladder.params(17) - 1) == 16
    assert ladder.rung_below(0) == 0


def test_a_rung_is_a_model_and_shares_its_files_with_the_next(tmp_path: Path) -> None:
    folders = [TINY.write(tmp_path, rung) for rung in (0, 2)]
    for rung, folder in zip((0, 2), folders, strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert sum(p.numel() for p in model.parameters()) == TINY.params(rung)
        assert len(model.model.layers) == TINY.layers(rung)
    small, large = (folder / "layer-0000.safetensors" for folder in folders)
    assert small.samefile(large)


@needs_groups
@pytest.mark.parametrize(("size", "ends_with"), [(16 * MIB, 0), (256 * MIB, -9)])
def test_the_kernel_ends_a_program_that_exceeds_the_limit(size: int, ends_with: int) -> None:
    assert GROUPS is not None
    program = [sys.executable, "-S", "-c", f"held = b'x' * {size}"]
    with limited_group(GROUPS, 128 * MIB) as group:
        assert subprocess.run([*group.enter, *program], check=False).returncode == ends_with
        peak = group.peak_bytes()
    assert peak is None or peak <= 128 * MIB
    assert not group.folder.exists()


@needs_groups
def test_a_group_ends_with_the_programs_that_are_left_in_it() -> None:
    assert GROUPS is not None
    with limited_group(GROUPS, 128 * MIB) as group:
        left = subprocess.Popen([*group.enter, "sleep", "1000"])
        while str(left.pid) not in (group.folder / "cgroup.procs").read_text().split():
            time.sleep(0.01)
    assert left.wait() == -9


@pytest.mark.merge
def test_a_contestant_that_has_room_holds_and_one_without_is_killed(tmp_path: Path) -> None:
    ours = next(each.entry for each in CLIMBERS if each.entry.is_ours)
    trial = attempt(ours, TINY, 0, tmp_path)
    assert trial.holds, trial.reason
    if GROUPS is not None:
        with limited_group(GROUPS, 48 * MIB) as group:
            trial = attempt(ours, TINY, 0, tmp_path, group)
        assert not trial.holds
        assert trial.reason == "killed while loading"


@pytest.mark.parametrize(
    ("returncode", "losses", "reason"),
    [
        (0, ["2.5", "2.25"], ""),
        (0, ["2.5", "NaN"], "losses [2.5, nan]"),
        (0, ["2.5"], "losses [2.5]"),
        (-9, ["2.5"], "killed in step 2"),
        (1, [], "ended with 1 in step 1: no room"),
    ],
)
def test_only_two_finite_losses_and_a_good_end_count(
    returncode: int, losses: list[str], reason: str
) -> None:
    answers = '{"ready": true}\n' + "".join(f'{{"loss": {loss}}}\n' for loss in losses)
    assert judge(returncode, answers, "no room\n") == reason


def row(params: int | None, *, ours: bool, states: str = "fp32", disk: bool = False) -> Any:
    return {"limit_gib": 2.0, "params": params, "is_ours": ours, "states": states, "disk": disk}


def test_ours_is_compared_with_the_best_rival_of_its_kind() -> None:
    rows = [
        row(100, ours=False),
        row(160, ours=False, states="8bit"),
        row(None, ours=False),
        {"label": "one that did not run", "is_ours": False, "failed": "..."},
        row(120, ours=True),
        row(200, ours=True, states="8bit"),
        row(900, ours=True, disk=True),
    ]
    found = ratios(rows)
    assert found == {"largest_over_best": {"2": 1.25}, "largest_over_fp32_states": {"2": 1.2}}
    assert ratios([*rows, row(600, ours=False, disk=True)])["largest_over_disk"] == {"2": 1.5}
