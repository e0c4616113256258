"""The kernels under test, and a way to build a broken one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatrain.optim import native
from megatrain.optim.kernel import Kernel
from megatrain.optim.native import NativeKernel
from megatrain.optim.torch_kernel import TorchKernel
from testkit.patience import HANG_S


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Two pools of threads that wait for each other on a busy machine take seconds a step."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def natives() -> list[Kernel]:
    """One native kernel for each instruction set of this machine."""
    if not native.LIBRARY.exists():
        pytest.skip("kernel.c is not built: python setup.py build_ext --inplace")
    sets = NativeKernel().instruction_sets
    return [NativeKernel(instruction_set=name) for name in sets]


@pytest.fixture(scope="session")
def kernels(natives: list[Kernel]) -> list[Kernel]:
    return [TorchKernel(), *natives]


@pytest.fixture
def compile_kernel(tmp_path: Path) -> Callable[..., NativeKernel]:
    """Compiles kernel.c with other flags, or with a piece of its text replaced."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        pytest.skip("no C compiler")

    def compile_(*flags: str, replace: tuple[str, str] = ("", "")) -> NativeKernel:
        text = native.LIBRARY.with_name("kernel.c").read_text()
        assert replace[0] in text
        source = tmp_path / "kernel.c"
        source.write_text(text.replace(*replace) if replace[0] else text)
        library = tmp_path / "libkernel.so"
        common = ["-std=c11", "-O2", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC"]
        command = [compiler, *common, *flags, str(source), "-o", str(library)]
        subprocess.run(command, check=True, timeout=HANG_S)
        return NativeKernel(library)

    return compile_
