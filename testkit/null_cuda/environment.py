"""The environment of the null CUDA device: torch's own CUDA build, beside the packages of CI.

    python -m testkit.null_cuda.environment    # prints its Python; makes it if it is not there

It has the versions of requirements-dev.lock, but torch as the package index has it, which is the
CUDA build (4.7 GB with its libraries), and what only proofs use: Liger and TRL. It is kept beside
the environment of CI, in a folder named by what is in it. Making it takes minutes; after TIME_S it
is given up, and the command ends with UNAVAILABLE and one line that says why. Nothing here is
imported from the project or from torch: the Python that makes it need not have either.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

LOCK = Path(__file__).parents[2] / "requirements-dev.lock"
FURTHER = ("liger-kernel==0.8.5", "trl==1.16.0")
TIME_S = 600.0
UNAVAILABLE = 3
"""Exit code: the environment cannot be had here."""


class NoEnvironment(Exception):
    """The environment is not there and cannot be made."""


def environment_folder() -> Path:
    """Return where the environment is, made or not."""
    usual = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatrain-ci"
    key = hashlib.sha256(repr((FURTHER, sys.version_info[:3])).encode() + LOCK.read_bytes())
    return Path(os.environ.get("MEGATRAIN_CI_CACHE", usual)) / "null_cuda" / key.hexdigest()[:16]


def find_python() -> Path | None:
    """Return the Python of the environment, or None if it was not made yet."""
    folder = environment_folder()
    return folder / "bin" / "python" if (folder / "complete").exists() else None


def make_environment(time_s: float = TIME_S) -> Path:
    """Return the Python of the environment, made within `time_s` seconds if it is not there.

    Processes that ask at the same time wait for the one that makes it. Raises NoEnvironment.
    """
    folder, until = environment_folder(), time.monotonic() + time_s
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (python := find_python()) is not None:
            return python
        shutil.rmtree(folder, ignore_errors=True)
        (torch,) = (one for one in LOCK.read_text().splitlines() if one.startswith("torch=="))
        # Without bytecode: it takes a minute, and most of it is never run.
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-compile", "--quiet"]
        # torch first: the lock file has no hash of it. Then nothing may ask for another one.
        _run([sys.executable, "-m", "venv", str(folder)], until)
        _run([*pip, torch], until)
        _run([*pip, "--no-deps", "-r", str(LOCK)], until)
        _run([*pip, *FURTHER], until)
        (folder / "complete").touch()
    return folder / "bin" / "python"


def _run(command: list[str], until: float) -> None:
    # Settings of this machine may lead to a folder of wheels with torch's CPU build.
    ours = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
    try:
        subprocess.run(
            command,
            env={**os.environ, **ours},
            timeout=max(1.0, until - time.monotonic()),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise NoEnvironment(f"{' '.join(command[1:])} did not end in time") from None
    except (OSError, subprocess.CalledProcessError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        raise NoEnvironment(f"{' '.join(command[1:])}: {' '.join(last)}") from None


def main() -> int:
    try:
        print(make_environment())
    except NoEnvironment as error:
        print(f"the environment of testkit/null_cuda cannot be made: {error}", file=sys.stderr)
        return UNAVAILABLE
    return 0


if __name__ == "__main__":
    sys.exit(main())
