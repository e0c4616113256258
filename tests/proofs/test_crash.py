"""Short forms of `python -m proofs.crash`; a protocol that leaves something out is found.

What forks, traces or mounts does so in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from proofs import crash
from proofs.crash import corruption
from proofs.crash.crash_states import FAULTS, judge, record
from proofs.crash.protocols import PROTOCOLS, RANK_PROTOCOLS
from proofs.crash.rank_saves import SPOILS, record_ranks
from proofs.crash.recorded import Op
from testkit.patience import HANG_S
from testkit.warm_python import warm_python

pytestmark = pytest.mark.merge

ROOT = Path(crash.__file__).parents[2]


def _play(what: str, count: int, *options: str) -> dict[str, Any]:
    words = ["-m", "proofs.crash", what, "--count", str(count), "--json", *options]
    done = subprocess.run(
        [*warm_python().command, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=4 * HANG_S,
        check=False,
    )
    assert done.stdout, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == bool(result["failures"])
    if "skipped" in result:
        pytest.skip(result["skipped"])
    return result


@pytest.mark.parametrize(("count", "options"), [(5, []), (2, ["--tier"])])
def test_a_run_that_was_killed_ends_as_one_that_was_not(count: int, options: list[str]) -> None:
    result = _play("sigkill", count, *options)
    assert result["failures"] == []
    assert result["kills"] >= count
    assert result["torn"] == result["lost"] == 0


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> list[Op]:
    return record(tmp_path_factory.mktemp("recorded") / "run")


def test_no_state_after_a_power_loss_is_torn_or_lost(log: list[Op], tmp_path: Path) -> None:
    counts = judge(log, 2000, 0, tmp_path / "real", 40)
    assert {key: counts[key] for key in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert counts["states"] >= 2000
    assert counts["compared"] > 20


@pytest.mark.parametrize("die_at", [1, 2, 12, 50, 80])
def test_nor_after_a_kill_and_then_a_power_loss(tmp_path: Path, die_at: int) -> None:
    counts = judge(record(tmp_path / "run", die_at), 300, die_at, tmp_path / "real", 5)
    assert {key: counts[key] for key in FAULTS} == dict.fromkeys(FAULTS, 0)


@pytest.fixture(scope="module")
def joint_log(tmp_path_factory: pytest.TempPathFactory) -> list[Op]:
    """What three ranks do that save together."""
    return record_ranks(tmp_path_factory.mktemp("ranks") / "run", 3)


def test_no_state_of_ranks_that_save_together_is_torn_or_lost(
    joint_log: list[Op], tmp_path: Path
) -> None:
    counts = judge(joint_log, 1500, 0, tmp_path / "real", 10)
    assert {key: counts[key] for key in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert counts["states"] >= 1500
    assert counts["compared"] > 0
    kinds = {rank: {op.kind for op in joint_log if op.rank == rank} for rank in range(3)}
    assert {"create", "fsync", "sync_names", "rename"} <= kinds[0]
    assert {"create", "fsync", "sync_names"} <= kinds[1]


@pytest.mark.parametrize("name", RANK_PROTOCOLS)
def test_ranks_that_leave_something_out_would_be_noticed(name: str, joint_log: list[Op]) -> None:
    counts = judge(RANK_PROTOCOLS[name](joint_log), 400, 0)
    assert counts["torn"] + counts["lost"] > 0


@pytest.mark.parametrize("spoil", SPOILS)
def test_other_ranks_whose_code_leaves_an_fsync_out_would_be_noticed(
    spoil: str, tmp_path: Path
) -> None:
    counts = judge(record_ranks(tmp_path / "run", 2, spoil), 400, 0)
    assert counts["torn"] + counts["lost"] > 0


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_that_leaves_something_out_would_be_noticed(name: str, log: list[Op]) -> None:
    counts = judge(PROTOCOLS[name](log), 400, 0)
    assert counts["torn"] + counts["lost"] > 0


def test_a_kill_at_the_first_calls_of_each_name_leaves_a_whole_checkpoint() -> None:
    result = _play("strace", 1)
    assert result["failures"] == []
    assert {"fsync", "pwrite64"} <= result["save"].keys()
    assert result["kills"] > 20


def test_no_power_loss_tears_or_loses_a_checkpoint() -> None:
    """And a writer without fsync loses some: that is one of the benchmark's own checks."""
    result = _play("power", 6)
    assert result["failures"] == []
    assert result["torn"] == result["lost"] == result["lines"] == 0


def test_damage_is_found_named_and_passed_over(tmp_path: Path) -> None:
    result = corruption.run(tmp_path, 120, 0, tell=False)
    assert result["failures"] == []
    assert result["damaged"] == result["found"] == result["right fallback"] > 120
    assert result["in a tensor"] == result["tensor named"] > 10


def test_a_reader_that_trusts_what_it_reads_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Same(str):
        __slots__ = ()

        def __ne__(self, other: object) -> bool:
            return False

    monkeypatch.setattr("megatrain.disk.checkpoint.checked_read.digest", lambda memory: Same())
    failures = corruption.run(tmp_path, 40, 0, tell=False)["failures"]
    assert any("bit" in failure for failure in failures)
