"""Build the device's library, once for each torch, compiler and state of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "native"
NAME = "host_gpu_library"
REQUIRED = "HOST_GPU_REQUIRED"
"""An environment variable. Set: what keeps the device from being had is an error (.ci/run)."""
FLAGS = ("-O1", "-g1", "-Wall", "-Wno-sign-compare")


class NoHostGpu(ImportError):
    """The device cannot be had here: tests of it are skipped, unless REQUIRED is set."""


def built_library() -> Path:
    """Return the library's path; build it where it is not in the cache (a minute).

    Processes that ask at the same time wait for the one that builds. Raises NoHostGpu.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None or shutil.which("ninja") is None:
        raise unavailable(
            f"testkit/host_gpu is built by {compiler} and ninja, and not both are here. Install a "
            "C++ compiler and ninja, or set CXX"
        )
    place = cache_folder() / build_key(compiler)
    library = place / f"{NAME}.so"
    if library.exists():
        return library
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(place, library)
    return library


def unavailable(why: str) -> Exception:
    """Return the error for it: one that skips tests, or one that does not."""
    return RuntimeError(why) if os.environ.get(REQUIRED) else NoHostGpu(why)


def cache_folder() -> Path:
    """Return where libraries are kept: beside the environment of CI, or in the user's cache."""
    usual = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatrain-ci"
    return Path(os.environ.get("MEGATRAIN_CI_CACHE", usual)) / "host_gpu"


def build_key(compiler: str) -> str:
    """Return what tells one build from another."""
    said = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(said)
    digest.update(repr((torch.__version__, FLAGS)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _build(place: Path, library: Path) -> None:
    from torch.utils import cpp_extension  # slow to import, and needed once

    with tempfile.TemporaryDirectory(dir=place) as workspace:
        try:
            cpp_extension.load(
                NAME,
                [str(SOURCES / "library.cpp")],
                extra_cflags=list(FLAGS),
                build_directory=workspace,
                is_python_module=False,
            )
        except (RuntimeError, OSError) as error:
            raise unavailable(f"testkit/host_gpu does not build: {error}") from error
        # Whole or not at all, whoever is killed meanwhile.
        os.replace(Path(workspace, f"{NAME}.so"), library)
