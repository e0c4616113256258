"""Every test in here is collected for three accelerators. Two need no hardware and belong to the
ordinary suite: the simulated one, and the one of testkit/host_gpu, which torch drives. The third,
marked `gpu`, is a real one.

    pytest                               what is fast, on the simulator and on the host's
    pytest -m merge                      the rest on the host's
    pytest tests/gpu -m "" --device simulated  on the simulator, all of it
    pytest tests/gpu -m "" --device hostgpu    on the host's alone
    pytest -m gpu --device cuda          on the hardware, all of it
"""

from __future__ import annotations

import functools
import importlib
import os
import zlib
from collections.abc import Iterator

import pytest
import torch
from _pytest.mark import ParameterSet

from megatrain.devices.runtime import TorchRuntime
from tests.gpu.rigs import HostGpuRig, RealRig, Rig, SimulatedRig

# cuBLAS sums in a fixed order only with a workspace of a fixed size, set before its first use. The
# small one, because it counts as device memory.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rig" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("--device")
    # What a driver warns of is no fault of ours.
    marks = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
    real = pytest.param("real", marks=marks)
    if asked is None:
        names = ["simulated", _host_gpu_param(), real]
    else:
        names = [{"simulated": "simulated", "hostgpu": _host_gpu_param()}.get(asked, real)]
    metafunc.parametrize("rig", names, indirect=True)


@functools.cache
def _host_gpu_param() -> ParameterSet:
    """Load the device, now: autograd makes its threads for the devices of its first use."""
    marks = [pytest.mark.hostgpu]
    try:
        importlib.import_module("testkit.host_gpu")
    except ImportError as error:
        marks.append(pytest.mark.skip(reason=str(error)))
    return pytest.param("hostgpu", marks=marks)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The many cases of a law run before a merge on the host's device.

    The simulator computes slowly: there they are for who asks for it.
    """
    if config.getoption("--device") is not None:
        return
    for item in items:
        if item.get_closest_marker("thorough") and not item.get_closest_marker("gpu"):
            on_host = item.get_closest_marker("hostgpu") is not None
            item.add_marker(pytest.mark.merge if on_host else pytest.mark.long)


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Rig:
    if request.param == "simulated":
        return SimulatedRig()
    if request.param == "hostgpu":
        return HostGpuRig(timing=zlib.crc32(request.node.nodeid.encode()))
    asked = request.config.getoption("--device")
    if torch.accelerator.current_accelerator(check_available=True) is None:
        pytest.skip(
            "torch.accelerator finds no accelerator here; `--device simulated` runs these tests "
            "without one"
        )
    return RealRig(TorchRuntime.find(asked or ""))


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time, and fp32 that is fp32."""
    precision = torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest")
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
