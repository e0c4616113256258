"""The comparison with what people use today: one command, one table.

    python -m benchmarks.rivals [--json] [--device cuda] [--parts speed,bytes] [--rounds 9]

Parts: speed, bytes (compared.py), and largest (benchmarks.rivals.largest, on the CPU).
Rivals are installed from PyPI at the first run (environments.py). What was measured is in
docs/evidence.md. Each row's command is

    PYTHONPATH=. PYTHON -P WORKER JOB.json

with the interpreter of the rival's environment and a job with the settings of the row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rivals.compared import (
    Figures,
    code_lines,
    measure_bytes,
    measure_speed,
)
from megatrain.optim.native import load_kernel

TARGETS = {"step_over_best": 0.9, "bytes_over_best": 0.55, "largest_over_best": 1.5}
PARTS = ("speed", "bytes", "largest")


def measure(parts: list[str], device: str, num_rounds: int) -> Figures:
    """Return the figures of the parts."""
    figures: Figures = {"device": device, "rounds": num_rounds, "kernel": load_kernel().description}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if "speed" in parts:
            figures |= measure_speed(scratch, device, num_rounds)
        if "bytes" in parts:
            figures |= measure_bytes(scratch, device)
    if "largest" in parts and device == "cpu":
        command = [sys.executable, "-m", "benchmarks.rivals.largest", "--json"]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures |= json.loads(run.stdout)
    return figures | {"targets": TARGETS}


def table(figures: Figures) -> Iterator[str]:
    """Yield the lines of the table, and of the ratios."""
    for row in figures.get("speed", []):
        shown = "did not run"
        if "over" in row:
            low, high = row["over_interval"]
            shown = f"{row['over']:.3f} ({low:.3f} to {high:.3f})"
        yield f"step    {row['label']:40} {shown:24} {_setup(row)}"
    for row in figures.get("bytes", []):
        held = f"{row['bytes_per_param']:8.2f} B" if "bytes_per_param" in row else "did not run"
        yield f"bytes   {row['label']:40} {held:24} {_setup(row)}"
    for name, value in figures.items():
        if not isinstance(value, list):
            yield f"{name:36} {value}"


def _setup(row: Figures) -> str:
    lines = code_lines(Path(row["worker"]).stem)
    return f"{row['worker']} ({lines} lines) {row['dtype']} {json.dumps(row['settings'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    options = parser.parse_args()
    figures = measure(options.parts.split(","), options.device, options.rounds)
    print(json.dumps(figures) if options.json else "\n".join(table(figures)))


if __name__ == "__main__":
    main()
