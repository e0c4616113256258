"""Which kernel is used, and what is said when it is not the fast one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatrain.optim import native
from megatrain.optim.kernel import Kernel
from megatrain.optim.native import LibraryError, NativeKernel, load_kernel
from megatrain.optim.torch_kernel import TorchKernel


def test_the_best_instruction_set_is_chosen(natives: list[Kernel]) -> None:
    assert load_kernel().description == natives[-1].description
    assert natives[0].description == "native (baseline)"


def test_without_a_library_torch_computes_and_says_why(tmp_path: Path) -> None:
    kernel = load_kernel(tmp_path / "libkernel.so")
    assert isinstance(kernel, TorchKernel)
    assert kernel.description == f"torch (libkernel.so is missing in {tmp_path})"


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "libkernel.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(LibraryError, match=r"libkernel\.so does not load: .*"):
        NativeKernel(broken)


@pytest.mark.merge
def test_a_library_of_another_version_is_refused(
    compile_kernel: Callable[..., NativeKernel],
) -> None:
    line = f"#define INTERFACE {native.INTERFACE}"
    wanted = f"{native.INTERFACE} is needed: install the package again"
    with pytest.raises(LibraryError, match=rf"libkernel\.so has interface 99, {wanted}"):
        compile_kernel("-ffp-contract=off", replace=(line, "#define INTERFACE 99"))
    with pytest.raises(LibraryError, match=f"has interface None, {wanted}"):
        NativeKernel(Path(torch._C.__file__))


def test_fast_math_does_not_compile(
    compile_kernel: Callable[..., NativeKernel], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception, match="returned non-zero exit status"):
        compile_kernel("-ffast-math")
    assert "promises the same bits everywhere" in capfd.readouterr().err


def test_triad(natives: list[Kernel]) -> None:
    a, b, c = torch.empty(1001).double(), torch.rand(1001).double(), torch.rand(1001).double()
    for kernel in natives:
        assert isinstance(kernel, NativeKernel)
        kernel.triad(a, b, c, num_threads=2)
        assert torch.equal(a, b + c * 3.0)
