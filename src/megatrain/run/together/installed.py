"""What is installed, as facts that all ranks must share: code, kernel, and versions of packages.

A version does not say which code runs: an edited clone keeps its number. The code is known by a
hash of every Python file of the package, the native kernel by a hash of its library.

Laws (tests/run/together/test_installed.py)
    1. A changed, added, removed or renamed Python file of the package changes the hash of the code;
       caches of the interpreter do not.
    2. A native kernel of other bytes, or the torch kernel in its place, is another kernel.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import xxhash

from megatrain.optim.native import LIBRARY, NativeKernel, load_kernel
from megatrain.version import __version__

PACKAGE = Path(__file__).parents[2]


def installed_facts() -> dict[str, str]:
    """Return what the bits of a run depend on. Reads some 300 small files the first time."""
    import numpy
    import tokenizers
    import torch
    import transformers

    packages = (numpy, tokenizers, torch, transformers)
    versions = {"megatrain": __version__, "Python": platform.python_version()}
    versions |= {package.__name__: package.__version__ for package in packages}
    return {
        "code of megatrain": code_digest(PACKAGE),
        "kernel": kernel_name(LIBRARY),
        **{f"version of {name}": version for name, version in versions.items()},
    }


@functools.cache
def code_digest(package: Path) -> str:
    """Return the hash of all Python files of a package, with their names."""
    found = xxhash.xxh3_128()
    for path in sorted(package.rglob("*.py")):
        data = path.read_bytes()
        found.update(f"{path.relative_to(package).as_posix()} {len(data)}\n".encode())
        found.update(data)
    return found.hexdigest()


@functools.cache
def kernel_name(library: Path) -> str:
    """Return the kernel that updates use: native with the hash of its library, or torch."""
    if isinstance(load_kernel(library), NativeKernel):
        return f"native, {library.name} {xxhash.xxh3_128_hexdigest(library.read_bytes())}"
    return "torch"
