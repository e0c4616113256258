"""The command line with URLs, against S3 on loopback: model, rows, run and export in a bucket."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatrain.config import dump_config
from megatrain.errors import Interrupted
from megatrain.places import open_place
from megatrain.run.uploads import send_folder
from testkit.patience import HANG_S
from testkit.runs import Setting, config_of, lines_of, run, write_world

pytest.importorskip("obstore", reason="obstore is not installed")
pytest.importorskip("moto", reason="moto is not installed")
pytestmark = pytest.mark.merge
ROOT = Path(__file__).parents[2]
SETTING = Setting(save_every=2, keep=1, eval_every=None)
URL = "s3://proof/runs/mine"
WEIGHTS = "model.safetensors"


@pytest.fixture
def _bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    command = [sys.executable, "-m", "proofs.bucket.server"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["storage"]
        for name, value in {
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "y",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": url,
        }.items():
            monkeypatch.setenv(name, value)
        yield
        server.stdin.close()  # it ends with its input


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Change to a machine of that name, which has nothing yet."""
    monkeypatch.setenv("MEGATRAIN_MEASURE", "0")

    def change(name: str) -> None:
        monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / name))

    return change


def megatrain(*words: str) -> str:
    command = [sys.executable, "-m", "megatrain", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.usefixtures("_bucket")
def test_a_run_continues_by_its_url_alone(tmp_path: Path, machine: Callable[[str], None]) -> None:
    machine("writer")
    write_world(tmp_path)
    send_folder("s3://proof/tiny", tmp_path / "model-0.0")
    open_place("s3://proof").send("rows.jsonl", tmp_path / "rows.jsonl")
    whole = config_of(tmp_path, tmp_path / "whole", SETTING)
    (tmp_path / "whole.yaml").write_text(dump_config(whole))
    megatrain("train", str(tmp_path / "whole.yaml"))
    expected = (tmp_path / "whole" / "model" / WEIGHTS).read_bytes()

    names = {
        "model": {"name_or_path": "s3://proof/tiny"},
        "data": {"train": "s3://proof/rows.jsonl"},
        "save": {"dir": URL},
    }
    config = config_of(tmp_path, tmp_path / "none", SETTING, **names)
    machine("first")
    with pytest.raises(Interrupted, match="stopped after step 3"):
        run(config, stop=3)
    megatrain("export", config.run_dir, str(tmp_path / "early"))
    assert (tmp_path / "early" / WEIGHTS).read_bytes() != expected

    machine("second")
    megatrain("train", URL, "--resume")
    folder = Path(config.run_dir)
    (resumed,) = (one for one in lines_of(folder, "events.jsonl") if one["event"] == "resumed")
    assert resumed["step"] == 3
    assert open_place(f"{URL}/model").read(WEIGHTS) == expected

    megatrain("export", str(folder), "s3://proof/mine")
    assert open_place("s3://proof/mine").read(WEIGHTS) == expected
    megatrain("export", f"{URL}/model", str(tmp_path / "back"))
    assert (tmp_path / "back" / WEIGHTS).read_bytes() == expected
