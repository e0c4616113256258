"""The example of rewards: a config of a few lines, and a model that learns from reward alone."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REWARD = "examples/rewards/reward.py:letters"


@pytest.mark.night
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_the_reward_rises_above_nine_tenths(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "MEGATRAIN_MEASURE": "0"}
    for words in (
        ["examples/rewards/make.py", "reverse"],
        ["-m", "megatrain", "train", "examples/rewards/reverse.yaml", "--rewards", REWARD],
    ):
        subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, check=True)
    lines = (tmp_path / "reverse/run/metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if "reward" in line]
    judged = [line["eval_reward"] for line in map(json.loads, lines) if "eval_reward" in line]
    assert steps[0]["reward"] < 0.02
    assert sum(line["reward"] for line in steps[-10:]) > 9
    assert judged[0] < 0.1 < 0.9 < judged[-1]
