"""The example of rewards: a run that is killed and started again ends with the same bits."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.retention import finished, step_of
from testkit.patience import eventually
from testkit.warm_python import warm_python

SCRIPT = Path(__file__).parents[2] / "examples" / "rewards" / "learn.py"


def started(folder: Path, num_steps: int) -> subprocess.Popen[bytes]:
    words = [str(SCRIPT), str(folder), "--steps", str(num_steps), "--save-every", "2"]
    return subprocess.Popen([*warm_python().command, *words], stdout=subprocess.PIPE)


@pytest.mark.merge
def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    """By its checkpoint, which has hashes of weights, masters and moments."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    run = started(killed, 1000)
    assert eventually(lambda: finished(killed / "checkpoints"))
    run.terminate()  # the script has no handler: it ends where it is
    run.communicate()
    assert run.returncode == -signal.SIGTERM
    num_steps = step_of(finished(killed / "checkpoints")[0]) + 1
    for folder in (killed, whole):
        run = started(folder, num_steps)
        run.communicate()
        assert run.returncode == 0
    first, second = (finished(folder / "checkpoints")[0] for folder in (killed, whole))
    assert step_of(first) == step_of(second) == num_steps
    assert read_manifest(first).files == read_manifest(second).files
    assert (killed / "model" / "model.safetensors").read_bytes() == (
        whole / "model" / "model.safetensors"
    ).read_bytes()
