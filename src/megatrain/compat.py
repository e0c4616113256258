"""Differences between the versions of torch that MegaTrain runs with, in one place.

pyproject.toml names the oldest versions, and `python .ci/versions.py lowest` tests with them. A
module that wants something newer asks here, and takes a slower way if the answer is None.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


@functools.cache
def document_kernel() -> Callable[..., Any] | None:
    """Return torch's attention kernel for documents of different lengths, or None.

    Torch has it from 2.10 on, with windows and scales from 2.11 on, and with fewer heads of keys
    than of queries from 2.12 on. Documents need all of these.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    taken = inspect.signature(varlen_attn).parameters
    kernel: Any = varlen_attn
    return kernel if {"scale", "window_size", "enable_gqa"} <= set(taken) else None
