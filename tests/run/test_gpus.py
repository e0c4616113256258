"""Real processes: `megatrain train --gpus 2` on the CPU, seen from outside, signaled, resumed."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatrain.config import Config, dump_config
from megatrain.disk.checkpoint.retention import finished
from testkit.patience import HANG_S, eventually
from testkit.rank_runs import run_on_ranks
from testkit.runs import Setting, config_of, lines_of
from testkit.strangers import LOOPBACK, Listener, listeners, plant, tree
from testkit.warm_python import warm_python
from tests.run.test_ranks import stopped, weights

SETTING = Setting(save_every=None, eval_every=None)
NUM_STEPS = 100_000
"""More than are taken until the signal."""


def _config(world: Path, run: Path) -> Config:
    return config_of(world, run, SETTING, train={"steps": NUM_STEPS, "rank_deadline": HANG_S})


def _ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(launcher.pid).children()
    return [child for child in found if os.getsid(child.pid) == child.pid]


def _wait_for_steps(launcher: subprocess.Popen[str], run: Path, count: int) -> None:
    """Wait until a run has written so many lines. Raises AssertionError if it ends before."""
    path = run / "metrics.jsonl"
    assert eventually(
        lambda: (path.exists() and len(lines_of(run)) >= count) or launcher.poll() is not None
    )
    assert launcher.poll() is None, launcher.communicate()[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A run on two ranks, of which one got SIGTERM, and everything seen of it."""

    run: Path
    listeners: set[Listener]
    """Of all its processes, in the middle of training."""
    overwritten: dict[int, list[str]]
    """Keys of its stores that a stranger has set to a pickle."""
    has_run_it: bool
    num_steps_then: int
    ranks: list[psutil.Process]
    code: int
    text: str


@pytest.fixture(scope="module")
def ended(world: Path, cache_in_world: None, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("gpus")
    run, made = folder / "run", folder / "made"
    (folder / "run.yaml").write_text(dump_config(_config(world, run)))
    launcher = subprocess.Popen(
        [sys.executable, "-m", "megatrain", "train", str(folder / "run.yaml"), "--gpus", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        _wait_for_steps(launcher, run, 3)
        ranks = _ranks_of(launcher)
        seen = listeners(*(process.pid for process in tree(launcher.pid)))
        overwritten = plant(made, {port for _, port in seen})
        plant(made, overwritten, base64.b64encode)
        num_steps = len(lines_of(run))
        _wait_for_steps(launcher, run, num_steps + 3)
        last = max(ranks, key=lambda rank: int(rank.environ()["RANK"]))
        last.send_signal(signal.SIGTERM)
        text, _ = launcher.communicate(timeout=HANG_S)
    finally:
        launcher.kill()
    return Ended(
        run=run, listeners=seen, overwritten=overwritten, has_run_it=made.exists(),
        num_steps_then=num_steps, ranks=ranks, code=launcher.returncode, text=text,
    )  # fmt: skip


@pytest.mark.merge
def test_no_process_of_a_run_listens_on_anything_but_the_loopback(ended: Ended) -> None:
    assert len(ended.ranks) == 2
    assert len(ended.listeners) >= 3  # the store, and gloo in each rank
    assert {host for host, _ in ended.listeners} <= LOOPBACK


@pytest.mark.merge
def test_a_pickle_that_a_stranger_leaves_is_not_run_and_the_run_goes_on(ended: Ended) -> None:
    (keys,) = ended.overwritten.values()
    assert any(key.endswith("/came") for key in keys)
    assert not ended.has_run_it
    assert ended.code == 130, ended.text


@pytest.mark.merge
def test_a_signal_to_one_rank_ends_all_and_the_run_resumes_to_its_bits(
    ended: Ended, world: Path, tmp_path: Path
) -> None:
    assert ended.code == 130, ended.text
    assert ended.text.count("Interrupted [MT130]: rank 1: SIGTERM: stopped after step") == 1
    assert "Traceback" not in ended.text
    assert not any(rank.is_running() for rank in ended.ranks)
    (checkpoint,) = finished(ended.run / "checkpoints")
    step = int(json.loads((checkpoint / "manifest.json").read_text())["step"])
    steps = [line["step"] for line in lines_of(ended.run) if "loss" in line]
    assert steps == list(range(1, step + 1))
    assert step > ended.num_steps_then
    # Ranks that are threads compute what processes do: they resume the run, and one that nothing
    # disturbed ends at the same step with the same bits.
    whole = tmp_path / "whole"
    use, interrupts = stopped(rank=0, step=step + 2)
    for folder in (ended.run, whole):
        config = _config(world, folder)
        run_on_ranks(2, config, use, resume=folder == ended.run, interrupts=interrupts)
    assert weights(ended.run) == weights(whole)
    assert lines_of(ended.run) == lines_of(whole)


@contextmanager
def _serving(*words: str) -> Iterator[int]:
    """Run a program that prints a number when it listens, and ends when standard input does."""
    command = [*warm_python().command, *words]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.kill()


def test_torchrun_standalone_would_be_seen_by_the_walk_and_run_the_pickle(tmp_path: Path) -> None:
    """The sibling: what `--gpus` used to start."""
    made, script = tmp_path / "made", tmp_path / "waits.py"
    script.write_text("import os, sys\nprint(os.getppid(), flush=True)\nsys.stdin.read()\n")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    with _serving(*torchrun) as pid:
        seen = listeners(pid)
        assert {host for host, _ in seen} - LOOPBACK
        plant(made, {port for _, port in seen}, base64.b64encode)
        assert eventually(made.exists)
