"""Checks an installed package: the compiled kernel loads, and the demo trains and resumes.

Run it with the interpreter that the package is installed for, from any folder.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

import torch

import megatrain
from megatrain.optim.native import load_kernel
from megatrain.optim.torch_kernel import TorchKernel


def main() -> None:
    """Print the version and the kernel, run the demo; a failure raises."""
    kernel = load_kernel()
    print(f"megatrain {megatrain.__version__} in {megatrain.__path__[0]}: {kernel.description}")
    assert kernel.description.startswith("native"), "the package was built without its kernel"
    grad = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    norms = [each.squared_norm(grad, num_threads=2) for each in (kernel, TorchKernel())]
    assert norms[0] == norms[1], norms
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "megatrain", "demo", f"{folder}/demo"], check=True)


if __name__ == "__main__":
    main()
