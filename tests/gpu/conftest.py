"""Every test in here is collected twice: for the simulated accelerator, which needs no hardware and
belongs to the ordinary suite, and, marked `gpu`, for a real one.

    pytest                               on the simulator, what is fast
    pytest tests/gpu --device simulated  on the simulator, all of it
    pytest -m gpu --device cuda          on the hardware, all of it
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from megatrain.devices.runtime import TorchRuntime
from tests.gpu.rigs import RealRig, Rig, SimulatedRig

# cuBLAS sums in a fixed order only with a workspace of a fixed size, set before its first use. The
# small one, because it counts as device memory.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rig" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("--device")
    # What a driver warns of is no fault of ours.
    marks = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
    names = ["simulated", pytest.param("real", marks=marks)]
    if asked is not None:
        names = names[:1] if asked == "simulated" else names[1:]
    metafunc.parametrize("rig", names, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The simulator computes slowly: the many cases of a law are for who asks for it."""
    if config.getoption("--device") is not None:
        return
    for item in items:
        if item.get_closest_marker("thorough") and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.long)


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Rig:
    if request.param == "simulated":
        return SimulatedRig()
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
