"""The Dockerfile agrees with the rest of the tree: versions, copied files, the builder's context.

No builder is needed here; .github/workflows/image.yml builds the image and runs the demo in it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text()
LOCK = (ROOT / "requirements-dev.lock").read_text()
WORKFLOWS = ROOT / ".github" / "workflows"


def _faults(dockerfile: str, ignored: str = IGNORED) -> list[str]:
    """Return what is wrong with a Dockerfile, in words."""
    faults = []
    ci: Any = yaml.safe_load((WORKFLOWS / "ci.yml").read_text())
    setup = [step["with"] for step in ci["jobs"]["check"]["steps"] if "setup-python" in str(step)]
    if re.findall(r"^FROM python:(\d+\.\d+)-", dockerfile, re.M) != [setup[0]["python-version"]]:
        faults.append("Python is not CI's")
    copied = [
        path for line in re.findall(r"^COPY (.*)$", dockerfile, re.M) for path in line.split()[:-1]
    ]
    allowed = set(re.findall(r"^!(.*)$", ignored, re.M))
    faults += [f"{path} is missing" for path in copied if not (ROOT / path).exists()]
    faults += [f"{path} is not sent" for path in set(copied) - allowed]
    faults += [f"{path} is sent and not used" for path in allowed - set(copied)]
    users = re.findall(r"^USER (\S+)$", dockerfile, re.M)
    if not users or users[-1] in ("0", "root"):
        faults.append("it runs as root")
    if not re.search(r'^ENTRYPOINT \["megatrain"\]$', dockerfile, re.M):
        faults.append("its program is not megatrain")
    if re.search(r"(?i)token|secret|passw|api_key", dockerfile):
        faults.append("it names a secret")
    return faults


def test_the_image_is_of_this_tree() -> None:
    assert _faults(DOCKERFILE) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("python:3.11-", "python:3.9-", "Python is not CI's"),
        ("COPY src src", "COPY source src", "source is missing"),
        ("COPY src src", "COPY docs src", "docs is not sent"),
        ("USER 1000", "USER root", "it runs as root"),
        ('["megatrain"]', '["bash"]', "its program is not megatrain"),
        ("ENV HOME", "ENV HF_TOKEN=x HOME", "it names a secret"),
    ],
)
def test_a_fault_would_be_noticed(old: str, new: str, fault: str) -> None:
    assert old in DOCKERFILE
    assert fault in _faults(DOCKERFILE.replace(old, new))


def test_versions_are_read_from_the_lock() -> None:
    """The pattern of the Dockerfile finds every package of the lock file, torch among them."""
    (pattern,) = re.findall(r"grep -o '([^']*)' requirements-dev\.lock", DOCKERFILE)
    found = [match.group() for line in LOCK.splitlines() if (match := re.match(pattern, line))]
    pinned = [line.split()[0] for line in LOCK.splitlines() if re.match(r"\w", line)]
    assert found == pinned
    assert len([each for each in found if each.startswith("torch==")]) == 1


def test_the_workflow_builds_both_kinds_and_runs_the_demo() -> None:
    job = yaml.safe_load((WORKFLOWS / "image.yml").read_text())["jobs"]["image"]
    commands = "\n".join(step.get("run", "") for step in job["steps"])
    assert re.search(r"\bhadolint\b.* Dockerfile", commands)
    assert '--build-arg TORCH_INDEX="$TORCH_INDEX"' in commands
    assert re.search(r"docker run .* demo ", commands)
    kinds = [each["index"] for each in job["strategy"]["matrix"]["include"]]
    (default,) = re.findall(r"^ARG TORCH_INDEX=(\S+)$", DOCKERFILE, re.M)
    assert kinds == ["https://download.pytorch.org/whl/cpu", default]
