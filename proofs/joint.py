"""Joint models trained on text: every family against transformers alone, in both precisions.

    python -m proofs.joint [--json] [--count 144] [--first 0] [--seconds 36000]

A case is a family in bf16 or in fp32. Losses, gradients and masters of several steps must have the
bits of the joint model under ordinary autograd; what is not text must have the bytes of the source
in the export, and the joint class must load it (testkit/joint_training.py).
"""

from __future__ import annotations

import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any, Literal

from transformers.utils import logging

from proofs.numbered import run as run_numbered
from testkit.joint_families import JOINT_FAMILIES
from testkit.joint_training import joint_faults

DTYPES: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
CASES = [(family, dtype) for dtype in DTYPES for family in JOINT_FAMILIES]


def faults_of(number: int) -> list[str]:
    """Return what differs in a case; there is nothing in one beyond the last."""
    if number >= len(CASES):
        return []
    family, dtype = CASES[number]
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return joint_faults(family, dtype, Path(folder))
    except Exception:
        return [traceback.format_exc()]


def describe(number: int) -> dict[str, Any]:
    """Return a case in words."""
    family, dtype = CASES[number]
    return {"family": family, "dtype": dtype}


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    run_numbered(__doc__ or "", faults_of, describe)
