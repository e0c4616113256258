"""`gpu-check --long` as a user starts it: pages, rates for plans, and a kill in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatrain.cli import long_check as module
from megatrain.cli.app import app
from megatrain.cli.long_check import keep_rates, write_pages
from megatrain.doctor.gpu_check.long.parts import PARTS
from megatrain.doctor.gpu_check.long.results import ResultFolder
from megatrain.doctor.gpu_check.long.running import new_result
from megatrain.errors import ConfigError
from megatrain.planning.machine.examination import measured_profile
from testkit.machines import DESKTOP
from testkit.patience import eventually
from tests.doctor.gpu_check.long.test_results import members
from tests.report.reading import read

CHECK: dict[str, Any] = {
    "checks": [], "causes": {}, "profile": json.loads(DESKTOP.to_json()), "step": {},
    "rates": {"update_kernel": "native", "product_flops": [[4096, 4096, 1.5e14]],
              "copy_in_bytes_per_s": 2e10, "copy_out_bytes_per_s": 2e10,
              "update_params_per_s": 1e9},
    "facts": {"device_name": "RTX 4090"}, "when": "today", "seconds": 60.0, "device": "cuda:0",
    "verdict": "This device computes correctly, and as fast as it should.",
}  # fmt: skip


def test_an_option_of_the_short_check_is_refused() -> None:
    done = CliRunner().invoke(app, ["gpu-check", "--long", "--params", "1B"])
    assert isinstance(done.exception, ConfigError)
    assert "--params is for the short check" in str(done.exception)


def test_pages_name_the_device_and_what_is_missing(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path / "check")
    folder.open()
    folder.write(replace(new_result(PARTS[0], "here", "done", ""), found={"check": CHECK}))
    write_pages(folder, "here", "cuda")
    index = read((folder.path / "index.html").read_text())
    assert "RTX 4090" in index.text
    assert all(part.name.replace("_", " ") in index.text for part in PARTS)
    assert CHECK["verdict"] in read((folder.path / "check.html").read_text()).text


def test_rates_are_kept_as_a_warm_device_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))
    clocks = {"figures": {"first_flops": 100e12, "sustained_flops": 90e12}}
    assert not keep_rates({"check": {}, "clocks": clocks})
    assert keep_rates({"check": {"check": CHECK}, "clocks": clocks})
    kept = measured_profile()
    assert kept is not None
    assert kept.forward_rate(4096, 4096) == pytest.approx(0.9 * 150e12)
    assert keep_rates({"check": {"check": CHECK}, "clocks": {}})
    assert measured_profile() == DESKTOP


def test_a_folder_of_somebody_else_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("<p>my page</p>")
    with pytest.raises(ConfigError, match="was not written by megatrain"):
        module.long_check("cpu", tmp_path / "mine")


@pytest.mark.night
@pytest.mark.hostgpu
def test_a_check_that_is_killed_goes_on_and_is_whole(tmp_path: Path) -> None:
    """All nine parts on the device of testkit/host_gpu, in small: two minutes of two cores."""
    pytest.importorskip("testkit.host_gpu", exc_type=ImportError)
    archive = tmp_path / "long.tar.gz"
    command = [sys.executable, "-m", "testkit.host_gpu", "gpu-check", "--long"]
    command += ["--device", "hostgpu", "--to", str(tmp_path / "long")]
    environment = {**os.environ, "MEGATRAIN_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        assert eventually(lambda: archive.exists() or process.poll() is not None)
        process.send_signal(signal.SIGKILL)
    first = json.loads(members(archive)["long/check.json"])
    assert first["state"] == "done", first["why"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "part 1 of 9, check: done before" in done.stderr
    found = members(archive)
    states = {part.name: json.loads(found[f"long/{part.name}.json"])["state"] for part in PARTS}
    assert set(states.values()) == {"done"}, states
    assert json.loads(found["long/check.json"])["when"] == first["when"]
    assert {"long/kernels-trace.json.gz", "long/lanes-trace.json", "long/check.html"} <= set(found)
    assert str(tmp_path).encode() not in b"".join(found.values())
