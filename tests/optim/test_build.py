"""The library is built where there is a C compiler; the package is built all the same without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatrain.optim.native import NativeKernel
from testkit.patience import HANG_S

ROOT = Path(__file__).parents[2]


def build(target: Path, **environment: str) -> tuple[Path, str]:
    """Run the build step of the package; return the path of its library, and its output."""
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "build_ext"]
    command += ["--build-lib", str(target), "--build-temp", str(target / "temp")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    return target / "megatrain" / "optim" / "libkernel.so", done.stdout


@pytest.mark.merge
@pytest.mark.usefixtures("compile_kernel")  # skips where there is no compiler
def test_a_compiler_is_enough(tmp_path: Path) -> None:
    library, said = build(tmp_path)
    assert NativeKernel(library).description.startswith("native")
    assert "one thread" not in NativeKernel(library).description + said


@pytest.mark.merge
@pytest.mark.usefixtures("compile_kernel")
def test_a_compiler_without_openmp_builds_a_kernel_of_one_thread(tmp_path: Path) -> None:
    """Apple's clang is such a compiler."""
    compiler = tmp_path / "cc"
    compiler.write_text(
        '#!/bin/sh\ncase " $* " in *" -fopenmp "*) exit 1;; esac\nexec cc "$@"\n',
    )
    compiler.chmod(0o755)
    library, said = build(tmp_path, CC=str(compiler))
    assert "compiled without OpenMP" in said
    plain, kernel = NativeKernel(), NativeKernel(library)
    assert kernel.description.endswith("one thread: built without OpenMP)")
    grad = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    norm, expected = (each.squared_norm(grad, num_threads=2) for each in (kernel, plain))
    assert norm == expected


@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler"])
def test_without_a_compiler_one_line_says_so(tmp_path: Path, compiler: str) -> None:
    library, said = build(tmp_path, CC=compiler)
    assert not library.exists()
    (line,) = [line for line in said.splitlines() if "torch kernel" in line]
    assert line.endswith(
        "kernel.c was not compiled (no working C compiler): "
        "the torch kernel will be used, same results, slower"
    )
