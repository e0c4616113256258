"""Which lines of the device code run while its tests run on testkit/host_gpu.

    python -m proofs.device_coverage          tests of devices and documents, the fast ones of gpu
    python -m proofs.device_coverage --all    tests/gpu with all its cases

Prints the share of each module and every line that did not run. Lines of CUDA's own are named
below, with the reason. It exits with 1 if another line did not run.
"""

from __future__ import annotations

import ast
import dis
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import megatrain

SOURCE = Path(megatrain.__file__).parent
MODULES = (
    "devices/accelerator.py",
    "devices/deterministic.py",
    "devices/device.py",
    "devices/pinning.py",
    "devices/runtime.py",
    "models/documents.py",
)
DOCUMENTS = (
    "tests/models/test_documents.py",
    "tests/models/test_compiled.py",
    "tests/engine/test_isolation.py",
    "tests/engine/test_towers.py",
    "tests/testkit/test_host_gpu_attention.py",
)
"""Tests of models/documents.py: on the processor, in graphs, beside towers, and with the kernel of
the device."""
OWN = {
    "devices/runtime.py": {
        "facts: Any = torch.cuda.get_device_properties(device)": "where a card is on the bus",
        'if hasattr(facts, "pci_bus_id"):': "the same",
        'return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"': (
            "the same"
        ),
        "return None  # a torch that does not know": "the same",
    },
    "models/documents.py": {
        'assert isinstance(attention_mask, WindowMask), "a layer made its own mask"': (
            "torch.compile reads it and puts its operation into a graph; no line of it runs"
        ),
        "scale = query.shape[-1] ** -0.5 if scaling is None else scaling": "the same",
        "return attend_operation(query, key, value, attention_mask.window, scale), None": (
            "the same"
        ),
    },
}
"""Lines that need CUDA, ROCm or XPU, or that only a compiler reads, by their text, and why."""
Lines = dict[str, set[int]]


def lines_of(path: Path) -> set[int]:
    """Return the lines of a module's functions that can run."""
    found: set[int] = set()

    def look(code: CodeType) -> None:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                inside = {line for _, line in dis.findlinestarts(constant) if line}
                # The first is where the definition stands, and is run when that is made.
                found.update(inside - {constant.co_firstlineno})
                look(constant)

    look(compile(path.read_text(), str(path), "exec"))
    return found - _protocol_lines(path)


def _protocol_lines(path: Path) -> set[int]:
    """Return the lines of protocols, which nobody runs."""
    lines: set[int] = set()
    for node in ast.parse(path.read_text()).body:
        bases = [getattr(base, "id", "") for base in getattr(node, "bases", [])]
        if isinstance(node, ast.ClassDef) and "Protocol" in bases:
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


@contextmanager
def watching(paths: dict[str, str], seen: Lines) -> Iterator[None]:
    """Note in `seen` the lines that run of these files, by all threads that begin inside."""

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            seen[paths[frame.f_code.co_filename]].add(frame.f_lineno)
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename in paths else None

    before = sys.gettrace()
    threading.settrace(call)
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(before)


def faults_of(name: str, path: Path, seen: set[int], own: dict[str, str]) -> list[str]:
    """Return the lines that did not run and should have, and those of CUDA's that are gone."""
    texts = [text.strip() for text in path.read_text().splitlines()]
    found = [
        f"{name}:{number} did not run: {texts[number - 1]}"
        for number in sorted(lines_of(path) - seen)
        if texts[number - 1] not in own
    ]
    found += [f"{name} has no line: {text}" for text in own if text not in texts]
    return found


def main(words: list[str]) -> int:
    marks = "not gpu" if "--all" in words else "not gpu and not thorough and not night"
    tests = ["tests/devices", "tests/gpu", *DOCUMENTS]
    options = ["--device", "hostgpu", "-q", "-m", marks, "-p", "no:cacheprovider"]
    paths = {str(SOURCE / name): name for name in MODULES}
    seen: Lines = defaultdict(set)
    with watching(paths, seen):
        code = int(pytest.main([*tests, *options]))
    faults = []
    for name in MODULES:
        lines = lines_of(SOURCE / name)
        print(f"{name}: {len(lines & seen[name])} of {len(lines)} lines ran")
        faults += faults_of(name, SOURCE / name, seen[name], OWN.get(name, {}))
    print("\n".join(faults))
    return code or bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
