"""Build the null device's library: its C++, and a stub for each further symbol that torch wants."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

NATIVE = Path(__file__).parent / "native"
SOURCES = ("device.cpp", "runtime.cpp", "driver.cpp")
LIBRARY = "libnull_cuda.so"
OPENED_BY_NAME = ("libcuda.so.1", "libnvidia-ml.so.1")
"""Names under which torch and Triton open the driver and NVML."""
_LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so")
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-deprecated-declarations")
_STUBBED = ("cuda", "cublas", "cudnn", "nccl")
"""Beginnings of the symbols of torch's libraries that may be stubs."""


class NoNullCuda(Exception):
    """The null device cannot be built here."""


class Answer(NamedTuple):
    """A line of symbols.txt."""

    name: str
    answer: tuple[str, ...]
    call: str

    def fits(self, symbol: str) -> bool:
        if self.name.endswith("*"):
            return symbol.startswith(self.name[:-1])
        return symbol == self.name


def site_packages(python: Path) -> Path:
    """Return where the packages of an environment are."""
    (found,) = python.parents[1].glob("lib/python3*/site-packages")
    return found


def built_library(python: Path) -> Path:
    """Return the library for the torch of an environment, built once. Raises NoNullCuda.

    Beside it lie links to it, named as OPENED_BY_NAME.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None or shutil.which("nm") is None:
        raise NoNullCuda(
            f"testkit/null_cuda is built by {compiler} and nm, and not both are here. Install a "
            "C++ compiler, or set CXX"
        )
    digest = hashlib.sha256(repr((compiler, _FLAGS)).encode() + Path(__file__).read_bytes())
    for source in sorted(NATIVE.iterdir()):
        digest.update(source.read_bytes())
    folder = python.parents[1] / f"null_cuda-{digest.hexdigest()[:16]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as workspace:
            made = Path(workspace) / "made"
            made.mkdir()
            _build(compiler, site_packages(python), made)
            try:
                made.rename(folder)
            except OSError:  # another process was faster
                if not folder.exists():
                    raise
    return folder / LIBRARY


def _build(compiler: str, packages: Path, folder: Path) -> None:
    headers = [f"-I{path}" for path in _headers(packages)]
    objects = []
    for name in SOURCES:
        objects.append(str(folder / f"{name}.o"))
        _run([compiler, *_FLAGS, *headers, "-c", str(NATIVE / name), "-o", objects[-1]])
    written = set(_symbols("--defined-only", objects))
    wanted = set(_symbols("-D", [str(packages / "torch" / "lib" / name) for name in _LIBRARIES]))
    stubs = folder / "stubs.cpp"
    stubs.write_text("\n".join(_stubs(wanted - written, written)))
    library = str(folder / LIBRARY)
    _run([compiler, *_FLAGS, "-shared", str(stubs), *objects, "-o", library, "-ldl"])
    for name in OPENED_BY_NAME:
        (folder / name).symlink_to(LIBRARY)


def _headers(packages: Path) -> Iterator[Path]:
    """Yield folders that have CUDA's headers: those of the packages, of Triton, of a toolkit."""
    places = [
        *packages.glob("nvidia/cu*/include"),
        *packages.glob("nvidia/cuda_runtime/include"),
        packages / "triton" / "backends" / "nvidia" / "include",
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include",
    ]
    yield from (place for place in places if place.is_dir())


def _symbols(which: str, files: Iterable[str]) -> Iterator[str]:
    """Yield the symbols that nm tells: those that are defined, or those that are wanted."""
    wanted = [] if which == "--defined-only" else ["--undefined-only"]
    for line in _run(["nm", which, *wanted, *files]).splitlines():
        name = line.split()[-1:] or [""]
        yield name[0].partition("@")[0]


def _stubs(wanted: Iterable[str], written: set[str]) -> Iterator[str]:
    """Yield C++ for the symbols that are wanted, or named in the table, and not written."""
    table = read_table()
    named = {line.name for line in table if not line.name.endswith("*")} - written
    yield '#include <cstring>\nextern "C" {'
    yield "void null_cuda_count(const char*);\nvoid* null_cuda_handle();"
    for symbol in sorted({s for s in wanted if s.startswith(_STUBBED)} | named):
        line = next((line for line in table if line.fits(symbol)), None)
        if line is not None and line.answer != ("own",):
            yield _stub(symbol, line)
    yield "}"


def _stub(symbol: str, line: Answer) -> str:
    kind, at = line.answer[0], int(line.answer[1]) if len(line.answer) > 1 else 0
    others = "void*, " * at
    counted = f'null_cuda_count("{line.call}"); ' if line.call else ""
    if kind == "handle":
        return f"int {symbol}({others}void** made) {{ *made = null_cuda_handle(); return 0; }}"
    if kind == "zero":
        return f"int {symbol}({others}int* value) {{ *value = 0; return 0; }}"
    if kind == "heuristic":
        return (
            f"int {symbol}({'void*, ' * 7}int, void* results, int* count) "
            "{ std::memset(results, 0, 64); *count = 1; return 0; }"
        )
    assert kind == "success", f"symbols.txt: {symbol}: {kind}"
    return f"int {symbol}() {{ {counted}return 0; }}"


def read_table() -> list[Answer]:
    """Return the lines of symbols.txt."""
    lines = []
    for text in (NATIVE / "symbols.txt").read_text().splitlines():
        words = text.split()
        if not words or text.startswith("#"):
            continue
        length = 2 if words[1] in ("handle", "zero") else 1
        lines.append(Answer(words[0], tuple(words[1 : 1 + length]), " ".join(words[1 + length :])))
    return lines


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        raise NoNullCuda(f"testkit/null_cuda does not build: {said}") from error
