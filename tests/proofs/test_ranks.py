"""Short forms of proofs/ranks: runs of several ranks, disturbed, end as those that were not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from megatrain.config import dump_config
from proofs.signals import end_of
from testkit.patience import HANG_S
from testkit.runs import Setting, config_of, write_world
from testkit.warm_python import warm_python

pytestmark = pytest.mark.merge

SETTING = Setting(save_every=1, dropout=0.1)
ROOT = Path(__file__).parents[2]
DIES_ONCE = """
import os, signal, sys
from megatrain.__main__ import main
from megatrain.data.tokens import prepare
from megatrain.run import checkpoints

config, victim = sys.argv[1:]
save = vars(checkpoints)["save_checkpoint"]

def die_at_the_second(parent, parts, snapshot, *rest, **more):
    if snapshot.num_steps == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return save(parent, parts, snapshot, *rest, **more)

if os.environ["RANK"] == victim and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    vars(checkpoints)["save_checkpoint"] = die_at_the_second
sys.argv = ["megatrain", "train", config]
main()
"""
SET_BY_TORCHRUN = ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


@pytest.mark.parametrize(
    "what",
    [
        "sigkill",
        pytest.param("partition", marks=pytest.mark.night),
        pytest.param("delay", marks=pytest.mark.night),
    ],
)
def test_ranks_that_were_disturbed_end_as_those_that_were_not(what: str) -> None:
    words = ["-m", "proofs.ranks", what, "--count", "1", "--json"]
    done = subprocess.run(
        [*warm_python().command, *words],
        capture_output=True, text=True, cwd=ROOT, timeout=4 * HANG_S, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert done.returncode == bool(result["failures"])
    if "skipped" in result:
        pytest.skip(result["skipped"])
    assert result["failures"] == []
    assert result["disturbed"] >= 1
    assert result["torn"] == result["lost"] == 0


def _train_by_torchrun(world: Path, run: Path, victim: int | None) -> str:
    """Train with two ranks, of which one is killed once in its second save; return what is said."""
    path = run.with_suffix(".yaml")
    path.write_text(dump_config(config_of(world, run, SETTING, train={"steps": 4})))
    removed = [f"--unset={name}" for name in SET_BY_TORCHRUN if name not in os.environ]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = ["env", *removed, *warm_python().command, "-c", DIES_ONCE, path, victim]
    done = subprocess.run(
        [*warm_python().command, *torchrun, "--max-restarts=2", "--no-python", *map(str, words)],
        capture_output=True, text=True, timeout=HANG_S, check=False,
        env={**os.environ, "MEGATRAIN_CACHE": str(world / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_torchrun_restarts_a_killed_run_unattended(tmp_path: Path) -> None:
    write_world(tmp_path)
    _train_by_torchrun(tmp_path, tmp_path / "whole", None)
    told = _train_by_torchrun(tmp_path, tmp_path / "killed", 1)
    assert "resum" in told
    assert end_of(tmp_path / "killed") == end_of(tmp_path / "whole")
