"""Start a program on the null device, in the environment that has torch's CUDA build."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from testkit.null_cuda.building import built_library
from testkit.null_cuda.environment import make_environment

ROOT = Path(__file__).parents[2]


def program_and_environment(
    *,
    capability: str = "8.9",
    mib: int = 24564,
    devices: int = 1,
    has_nvml: bool = True,
    variables: Mapping[str, str] | None = None,
) -> tuple[str, dict[str, str]]:
    """Return the Python to start, and its environment variables; makes what is missing.

    Raises NoEnvironment, NoNullCuda.
    """
    python = make_environment()
    library = built_library(python)
    settings = {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),  # for what is opened by name
        "NULL_CUDA_CAPABILITY": capability,
        "NULL_CUDA_MIB": str(mib),
        "NULL_CUDA_DEVICES": str(devices),
        "NULL_CUDA_NVML": str(int(has_nvml)),
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH") or f"{ROOT}/src", str(ROOT)]),
        "TRITON_CACHE_DIR": str(python.parents[1] / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(python.parents[1] / "inductor"),
        "HF_HUB_OFFLINE": "1",
    }
    return str(python), {**os.environ, **settings, **(variables or {})}
