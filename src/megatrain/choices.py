"""Values that settings and options of the command line share; importing them costs nothing."""

from __future__ import annotations

import re
import sys
from typing import Literal

RowFormat = Literal[
    "auto", "tokens", "messages", "alpaca", "prompt_completion", "text", "pairs", "kto"
]
"""The formats of rows; data/rows/formats.py has everything else about each."""
PreferenceFormat = Literal["pairs", "kto"]
"""The formats whose rows are two answers each, to be compared."""
Divergence = Literal["forward", "reverse", "jsd"]
"""How a student is compared with its teacher; losses/distillation.py has the meaning of each."""
COLUMNS = (
    "messages", "prompt", "completion", "text", "instruction", "input", "output", "history",
    "system", "tools", "chat_template_kwargs", "chosen", "rejected", "label", "input_ids", "labels",
    "attention_mask", "images", "audios", "role", "content",
)  # fmt: skip
"""Our names of columns, which `columns` of a source gives to those of a file. The last two are keys
of a turn."""
Method = Literal[
    "sft", "lora", "pretrain", "dpo", "ipo", "orpo", "simpo", "apo_zero", "robust", "kto",
    "distill", "grpo",
]  # fmt: skip
"""The ways to train of a first config: cli/first_config.py has the settings of each."""
ALL_LINEAR = "all-linear"
"""The target of adapters that stands for every linear module of the layers."""
ALL_EXPERTS = "all-experts"
"""The name that stands for every param of the layers that has a matrix for each expert."""
BaseForm = Literal["auto", "as_published", "nf4", "bf16"]
"""The forms of a frozen model under adapters; disk/hf/narrowed.py has their meaning."""
StateDtype = Literal["fp32", "bf16", "8bit"]
"""The precisions of optimizer states, the most exact first; optim/states.py has their kinds."""


def why_not_compiled() -> str:
    """Return what is wrong with torch.compile on this Python with this torch; empty: nothing."""
    from importlib.metadata import version  # 50 ms, which a plan for a CPU does without

    return compiler_fault(sys.version_info[:3], version("torch"))


def compiler_fault(python: tuple[int, ...], torch: str) -> str:
    """Return what is wrong with torch.compile there; empty: nothing."""
    if python == (3, 13, 0):  # CPython's issue 125608
        return (
            "Python 3.13.0 does not tell torch that a module has changed, so a compiled layer may "
            "compute what another one should; 3.13.1 does"
        )
    if python >= (3, 14) and re.match(r"2\.\d\.", torch):
        return f"torch {torch} cannot compile on Python 3.14; torch 2.10 can"
    return ""
