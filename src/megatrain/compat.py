"""Differences between the versions of torch that MegaTrain runs with, in one place.

pyproject.toml names the oldest versions, and `python .ci/versions.py lowest` tests with them. A
module that wants something newer asks here, and takes a slower way if the answer is None.

Laws (tests/test_compat.py)
    1. A version that lacks something is noticed by the names and arguments it has, and serves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

Given = ParamSpec("Given")
Result = TypeVar("Result")


def find_document_kernel() -> Callable[..., Tensor] | None:
    """Return torch's attention kernel for documents of different lengths, or None.

    Torch has it from 2.10 on, with windows and scales from 2.11 on, and with fewer heads of keys
    than of queries from 2.12 on. Documents need all of these.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    taken = inspect.signature(varlen_attn).parameters
    kernel = cast("Callable[..., Tensor]", varlen_attn)
    return kernel if {"scale", "window_size", "enable_gqa"} <= set(taken) else None


@contextmanager
def autograd_in_operation() -> Iterator[None]:
    """Let autograd see what the code of an operation computes: torch calls that code below it."""
    keys: Any = torch._C.DispatchKey
    excluded: Any = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


document_kernel: Callable[[], Callable[..., Tensor] | None] = functools.cache(find_document_kernel)
"""The kernel or None, looked for once."""


def compile_apart(
    function: Callable[Given, Result],
    *,
    max_graphs: int,
    backend: str | Callable[..., Any],
    options: dict[str, Any] | None,
) -> Callable[Given, Result]:
    """Return a compiled function that counts its graphs apart from all others.

    Before torch 2.13 one limit holds for all functions. It is raised for each call here, and graphs
    are counted by a function's code, so `function` must have code of its own.
    """
    chosen: dict[str, Any] = {"backend": backend, "options": options}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        chosen |= {"recompile_limit": max_graphs, "isolate_recompiles": True}
        newest: Callable[Given, Result] = torch.compile(function, **chosen)
        return newest
    compiled: Callable[Given, Result] = torch.compile(function, **chosen)

    def limited(*given: Given.args, **named: Given.kwargs) -> Result:
        from torch._dynamo import config

        with config.patch(recompile_limit=max_graphs):
            return compiled(*given, **named)

    return limited


def set_allocator(settings: str) -> None:
    """Set what PYTORCH_ALLOC_CONF would, before the device's first allocation."""
    # Until torch 2.9 the setting was CUDA's alone.
    name = "_accelerator_setAllocatorSettings"
    older = "_cuda_cudaCachingAllocator_set_allocator_settings"
    getattr(torch._C, name if hasattr(torch._C, name) else older)(settings)
