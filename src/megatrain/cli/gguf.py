"""A Hugging Face folder as one GGUF file, by the converter of llama.cpp.

The converter, convert_hf_to_gguf.py, is a program of llama.cpp's repository: the package index has
it from strangers only. It is looked for in the folder that MEGATRAIN_LLAMA_CPP names, else on PATH.
It gets no network, and the GGUF appears under its name when it is complete.

Invariants (tests/cli/test_gguf.py; `python -m proofs.gguf` with llama.cpp itself)
    1. A failure leaves no file, and the error repeats what the converter said.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatrain.disk.hf.model import Precision
from megatrain.errors import ConfigError, ConverterError, MissingPackage

VARIABLE = "MEGATRAIN_LLAMA_CPP"
PROGRAM = "convert_hf_to_gguf.py"
RELEASE = "b10586"
"""The release of llama.cpp whose converter has the options that are given here."""
OUTTYPES: dict[Precision, str] = {"bf16": "bf16", "fp32": "f32"}
"""`--outtype` for each precision of a folder; the converter's `auto` makes fp16 of fp32."""
_LAST_LINES = 4


def find_converter(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command that starts the converter. Raises MissingPackage if there is none.

    The script of a folder runs in this interpreter, which has torch and transformers. A program on
    PATH is started as it is: whoever installed it chose its interpreter.
    """
    if folder := environment.get(VARIABLE):
        script = Path(folder) / PROGRAM
        if script.is_file():
            return [sys.executable, str(script)]
        missing = f"{VARIABLE} is {folder}, where there is no {PROGRAM}"
    else:
        if program := shutil.which(PROGRAM, path=environment.get("PATH")):
            return [program]
        missing = f"{PROGRAM} is not on PATH, and {VARIABLE} is not set"
    raise MissingPackage(
        f"--gguf needs llama.cpp's converter: {missing}. Run `git clone "
        f"https://github.com/ggml-org/llama.cpp` and `export {VARIABLE}=$PWD/llama.cpp` (written "
        f"for its release {RELEASE})."
    )


def convert(converter: Sequence[str], folder: Path, target: Path, precision: Precision) -> None:
    """Write the model in `folder` to the file `target`. Raises ConverterError, or ConfigError."""
    command = [*converter, str(folder), "--outfile", str(target), "--outtype", OUTTYPES[precision]]
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"{converter[0]} cannot be started: {error.strerror}.") from None
    if done.returncode or not target.is_file():
        lines = [line for line in done.stdout.splitlines() if line.strip()][-_LAST_LINES:]
        said = "\n  ".join(["It said:", *lines]) if lines else "It said nothing."
        raise ConverterError(
            f"{converter[-1]} ended with code {done.returncode} and wrote no GGUF (its options "
            f"are those of llama.cpp {RELEASE}). {said}"
        )
