"""Real processes: `megatrain train --gpus 2` on the CPU, one rank signalled, and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatrain.config import Config, dump_config
from megatrain.disk.checkpoint.retention import finished
from testkit.patience import HANG_S, eventually
from testkit.rank_runs import run_on_ranks
from testkit.runs import Setting, config_of, lines_of
from tests.run.test_ranks import stopped, weights

SETTING = Setting(save_every=None, eval_every=None)
NUM_STEPS = 400
"""More than are taken until the signal."""


def _config(world: Path, run: Path, steps: int) -> Config:
    return config_of(world, run, SETTING, train={"steps": steps, "rank_deadline": HANG_S})


def _ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(launcher.pid).children()
    return [child for child in found if os.getsid(child.pid) == child.pid]


@pytest.mark.usefixtures("cache_in_world")
def test_a_signal_to_one_rank_ends_all_and_the_run_resumes_to_its_bits(
    world: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (tmp_path / "run.yaml").write_text(dump_config(_config(world, run, NUM_STEPS)))
    launcher = subprocess.Popen(
        [sys.executable, "-m", "megatrain", "train", str(tmp_path / "run.yaml"), "--gpus", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert eventually(lambda: (run / "metrics.jsonl").exists() and len(lines_of(run)) > 2)
        ranks = _ranks_of(launcher)
        assert len(ranks) == 2
        last = max(ranks, key=lambda rank: int(rank.environ()["RANK"]))
        last.send_signal(signal.SIGTERM)
        text, _ = launcher.communicate(timeout=HANG_S)
    finally:
        launcher.kill()
    assert launcher.returncode == 130, text
    assert text.count("Interrupted [MT130]: rank 1: SIGTERM: stopped after step") == 1
    assert "Traceback" not in text
    assert not any(rank.is_running() for rank in ranks)
    (checkpoint,) = finished(run / "checkpoints")
    step = int(json.loads((checkpoint / "manifest.json").read_text())["step"])
    assert [line["step"] for line in lines_of(run) if "loss" in line] == list(range(1, step + 1))
    # Ranks that are threads compute what processes do: they resume the run, and one that nothing
    # disturbed ends at the same step with the same bits.
    whole = tmp_path / "whole"
    use, interrupts = stopped(rank=0, step=step + 2)
    for folder in (run, whole):
        config = _config(world, folder, NUM_STEPS)
        run_on_ranks(2, config, use, resume=folder == run, interrupts=interrupts)
    assert weights(run) == weights(whole)
    assert lines_of(run) == lines_of(whole)
