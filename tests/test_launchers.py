"""Launchers of examples/launchers, executed: submit, preempt, resume, and the same bits."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatrain.config import dump_config
from megatrain.disk.checkpoint.manifest import read_manifest
from megatrain.disk.checkpoint.retention import finished
from megatrain.run.folder import FOLDER
from testkit.patience import HANG_S, eventually
from testkit.runs import Setting, config_of, lines_of, write_world

LAUNCHERS = Path(__file__).parents[1] / "examples" / "launchers"
LAUNCH_S = 4 * HANG_S
"""A launcher starts several interpreters one after the other."""
NUM_STEPS = 100
SETTING = Setting(save_every=2, eval_every=None)
pytestmark = pytest.mark.night


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("world")
    write_world(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRAIN_CACHE", str(folder / "cache"))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield folder


def config(world: Path, run: Path) -> str:
    """Write the config of a run; return its path."""
    path = run.with_suffix(".yaml")
    settings = config_of(world, run, SETTING, train={"steps": NUM_STEPS})
    path.write_text(dump_config(settings))
    return str(path)


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def started(command: list[str], **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command; end what is left of it."""
    process = subprocess.Popen(command, env=os.environ | variables, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def has_steps(run: Path, num_steps: int) -> bool:
    path = run / "metrics.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") >= num_steps


def result(run: Path) -> Mapping[str, object]:
    """Return the hashes of all files of the last checkpoint, which is that of the last step."""
    newest = finished(run / FOLDER)[0]
    manifest = read_manifest(newest)
    assert manifest.step == NUM_STEPS
    return manifest.files


def events(run: Path, kind: str) -> int:
    if not (run / "events.jsonl").exists():
        return 0
    return sum(event["event"] == kind for event in lines_of(run, "events.jsonl"))


def torchrun(world: Path, run: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command of two ranks, and its variables."""
    command = ["sh", str(LAUNCHERS / "torchrun.sh"), config(world, run)]
    return command, {"GPUS": "2", "HEAD": f"127.0.0.1:{port()}"}


@pytest.fixture(scope="module")
def whole(world: Path) -> Path:
    """A run of two ranks that nothing disturbed."""
    command, variables = torchrun(world, world / "whole")
    with started(command, **variables) as process:
        assert process.wait(LAUNCH_S) == 0
    assert events(world / "whole", "resumed") == 0
    return world / "whole"


def test_torchrun_continues_after_a_notice(world: Path, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command, variables = torchrun(world, run)
    with started(command, **variables) as process:
        assert eventually(lambda: has_steps(run, 5))
        process.send_signal(signal.SIGTERM)
        assert process.wait(LAUNCH_S) != 0
    assert events(run, "interrupted") == 1
    with started(command, **variables) as process:
        assert process.wait(LAUNCH_S) == 0
    assert events(run, "resumed") == 1
    assert result(run) == result(whole)


def test_torchrun_starts_ranks_again_when_one_dies(
    world: Path, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command, variables = torchrun(world, run)
    with started(command, **variables) as process:
        assert eventually(lambda: has_steps(run, 5))
        os.kill(int((run / ".lock").read_text()), signal.SIGKILL)  # rank 0
        assert process.wait(LAUNCH_S) == 0
    assert events(run, "resumed") == 1
    assert result(run) == result(whole)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_ray_starts_actors_again_and_a_job_continues(
    world: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank is the child of an actor; rank 0 has the lock of the run folder."""
    pytest.importorskip("ray.train", reason="ray[train] is not installed")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    storage = f"file://{tmp_path}/storage"
    run = Path(config_of(world, world, SETTING, save={"dir": f"{storage}/mine/run"}).run_dir)
    command = [sys.executable, str(LAUNCHERS / "ray_train.py"), config(world, tmp_path / "mine")]
    command += ["--storage", storage, "--name", "mine", "--ranks", "2"]
    with started(command) as process:
        assert eventually(lambda: has_steps(run, 5))
        process.send_signal(signal.SIGTERM)
        process.wait(LAUNCH_S)
    before = len(lines_of(run))
    assert before < NUM_STEPS
    with started(command) as process:
        assert eventually(lambda: has_steps(run, before + 5))
        os.kill(parent(int((run / ".lock").read_text())), signal.SIGKILL)
        assert process.wait(LAUNCH_S) == 0
    assert events(run, "resumed") == 2
    assert result(run) == result(whole)


SLURM = Path(os.environ.get("SLURM_ROOT", "/"))
"""Where the packages of Slurm are unpacked: slurmctld, slurmd, slurm-client, munge and plugins."""
SLURM_CONF = """\
ClusterName=t
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={run}/munge.socket
CredType=cred/munge
PluginDir={plugins}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldPort={port}
StateSaveLocation={run}/state
SlurmdSpoolDir={run}/spool/%n
SlurmctldPidFile={run}/slurmctld.pid
SlurmdPidFile={run}/slurmd-%n.pid
SlurmctldLogFile={run}/ctl.log
SlurmdLogFile={run}/slurmd-%n.log
MpiDefault=none
KillWait=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Slurm of two nodes on this host; yields the variables of its commands."""
    programs = SLURM / "usr/sbin"
    names = ("munged", "slurmctld", "slurmd", "slurmstepd")
    found = [path for name in names for path in sorted(programs.glob(f"{name}*"))[:1]]
    if len(found) < len(names) or os.geteuid() != 0:
        pytest.skip("no Slurm here: set SLURM_ROOT to where its packages are unpacked, as root")
    run = tmp_path / "slurm"
    (run / "state").mkdir(parents=True)
    (run / "spool" / "n1").mkdir(parents=True)
    (run / "spool" / "n2").mkdir()
    plugins = next(SLURM.glob("usr/lib/*/slurm-wlm"))
    (run / "munge.key").write_bytes(os.urandom(1024))
    (run / "munge.key").chmod(0o400)
    facts = {"host": socket.gethostname().split(".")[0], "run": run, "plugins": plugins}
    facts |= {name: port() for name in ("port", "first", "second")}
    (run / "slurm.conf").write_text(SLURM_CONF.format(**facts))
    libraries = f"{plugins}:{plugins.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    variables = {"SLURM_CONF": str(run / "slurm.conf"), "LD_LIBRARY_PATH": libraries}
    variables["PATH"] = f"{SLURM / 'usr/bin'}:{os.environ['PATH']}"
    munged, control, node, step = map(str, found)
    munge = [munged, "--foreground", "--force", "--socket", f"{run}/munge.socket"]
    munge += ["--key-file", f"{run}/munge.key", "--pid-file", f"{run}/munged.pid"]
    munge += ["--log-file", f"{run}/munged.log", "--seed-file", f"{run}/munged.seed"]
    with (
        started(munge, **variables),
        started([control, "-D"], **variables),
        started([node, "-D", "-N", "n1", "-d", step], **variables),
        started([node, "-D", "-N", "n2", "-d", step], **variables),
    ):
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        assert eventually(lambda: said(idle, variables) == "2")
        try:
            yield variables
        finally:  # a job of a test that failed
            said(["scancel", "--user=root"], variables)
            assert eventually(lambda: said(["squeue", "--noheader"], variables) == "")


def said(command: list[str], variables: Mapping[str, str]) -> str:
    found = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def test_slurm_queues_a_job_again_and_it_continues(
    world: Path, whole: Path, tmp_path: Path, slurm: dict[str, str]
) -> None:
    run = tmp_path / "run"
    variables = slurm | {"GPUS": "1", "HEAD": f"127.0.0.1:{port()}"}
    options = ["--gpus-per-node=0", f"--output={tmp_path}/job.out", "--parsable"]
    job = said(["sbatch", *options, str(LAUNCHERS / "slurm.sbatch"), config(world, run)], variables)
    assert job.isdigit()
    assert eventually(lambda: has_steps(run, 5))
    said(["scontrol", "requeue", job], variables)

    def state() -> str:
        return said(["squeue", "--noheader", f"--jobs={job}", "--format=%T"], variables)

    assert eventually(lambda: events(run, "resumed") == 1), (tmp_path / "job.out").read_text()
    assert eventually(lambda: state() in ("", "COMPLETED")), (tmp_path / "job.out").read_text()
    assert result(run) == result(whole)
    shutil.rmtree(tmp_path / "slurm" / "spool")
