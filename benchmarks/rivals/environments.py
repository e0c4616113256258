"""Each rival's own environment, from PyPI at pinned versions, in the cache folder.

    python -m benchmarks.rivals.environments      makes all of them, and prints their interpreters

Ours is the interpreter that runs. torch is installed first and alone: a looser requirement would
download another build.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatrain.cache import writable_cache_folder

TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.22.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What is installed, and what a process in it finds in its environment."""

    requirements: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)


ENVIRONMENTS = {
    "hf": Environment(requirements=("numpy", TRANSFORMERS, "accelerate==1.15.0")),
    "torchao": Environment(
        requirements=("numpy", TRANSFORMERS, "accelerate==1.15.0", "torchao==0.18.0")
    ),
    "deepspeed": Environment(
        requirements=("numpy", TRANSFORMERS, "accelerate==1.15.0", "deepspeed==0.19.8"),
        variables={"DS_ACCELERATOR": "cpu"},
    ),
}


def python_of(name: str) -> Path:
    """Return the interpreter of an environment, made now if it is not complete."""
    wanted = "\n".join((TORCH, *ENVIRONMENTS[name].requirements))
    digest = hashlib.sha256(wanted.encode()).hexdigest()[:8]
    home = writable_cache_folder() / "rivals" / f"{name}-{digest}"
    home.parent.mkdir(exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        complete = home / "complete"
        if not complete.exists():
            shutil.rmtree(home, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", home], check=True)
            for requirements in ((TORCH,), ENVIRONMENTS[name].requirements):
                install = [str(home / "bin/pip"), "install", "--quiet", *requirements]
                subprocess.run(install, check=True, stdout=sys.stderr)
            complete.write_text(wanted)
    return home / "bin/python"


if __name__ == "__main__":
    for each in ENVIRONMENTS:
        print(each, python_of(each))
