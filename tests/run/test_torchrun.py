"""Real restarts by torchrun: a command that was refused stays refused."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest

from megatrain.config import dump_config
from testkit.patience import HANG_S
from testkit.runs import Setting, config_of
from testkit.warm_python import warm_python

SETTING = Setting(save_every=1, eval_every=None)
SET_BY_TORCHRUN = ("OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
STATIC = ["--nproc-per-node=1", "--master-port={port}"]
SHARED = ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}"]


def _train(options: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run torchrun with the id 1, which starts a rank that fails a second time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    removed = [f"--unset={name}" for name in SET_BY_TORCHRUN if name not in os.environ]
    torchrun = [option.format(port=port) for option in options]
    torchrun += ["--rdzv-id=1", "--max-restarts=1", "--monitor-interval=0.1", "--no-python"]
    command = [*warm_python().command, "-m", "torch.distributed.run", *torchrun]
    return subprocess.run(
        [*command, "env", *removed, *warm_python().command, "-m", "megatrain", "train", *words],
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


def _files(folder: Path) -> dict[str, bytes]:
    """Return all files but the lock, which says who held it last."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.merge
@pytest.mark.usefixtures("cache_in_world")
@pytest.mark.parametrize("options", [STATIC, SHARED], ids=["static, one rank", "c10d, two ranks"])
def test_a_command_that_was_refused_is_refused_again_and_changes_nothing(
    options: list[str], world: Path, tmp_path: Path
) -> None:
    run, path = tmp_path / "run", tmp_path / "run.yaml"
    path.write_text(dump_config(config_of(world, run, SETTING, train={"steps": 2})))
    first = _train(options, str(path))
    assert first.returncode == 0, first.stderr
    before = _files(run)
    second = _train(options, str(path), "optim.learning_rate=0.5", "train.steps=4")
    assert second.returncode != 0
    assert (second.stdout + second.stderr).count("RunFolderError [MT502]") == 2, second.stderr
    assert _files(run) == before
