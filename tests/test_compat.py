"""What older versions of torch lack is noticed, and MegaTrain does without it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megatrain import compat

VARLEN = "torch.nn.attention.varlen"


def _of_2_10(query: Any, is_causal: bool = False) -> None: ...


def _of_2_11(query: Any, *, scale: Any = None, window_size: Any = (-1, -1)) -> None: ...


def _of_2_12(
    query: Any, *, scale: Any = None, window_size: Any = (-1, -1), enable_gqa: bool = False
) -> None: ...


@pytest.mark.parametrize(("kernel", "taken"), [(_of_2_10, 0), (_of_2_11, 0), (_of_2_12, 1)])
def test_a_kernel_must_know_windows_and_groups(
    kernel: Any, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType(VARLEN)
    module.varlen_attn = kernel
    monkeypatch.setitem(sys.modules, VARLEN, module)
    assert compat.find_document_kernel() is (kernel if taken else None)


def test_a_torch_without_the_kernel_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, VARLEN, None)
    assert compat.find_document_kernel() is None


def test_an_older_compiler_has_its_limit_raised_during_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo import config

    def older(function: Any, backend: str, options: Any) -> Any:
        return function

    before = config.recompile_limit
    monkeypatch.setattr(torch, "compile", older)
    limit = compat.compile_apart(
        lambda: config.recompile_limit, max_graphs=32, backend="eager", options=None
    )
    assert (limit(), config.recompile_limit) == (32, before)
    assert before != 32


def test_an_older_allocator_is_cudas(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings", raising=False)
    cudas = "_cuda_cudaCachingAllocator_set_allocator_settings"
    monkeypatch.setattr(torch._C, cudas, told.append, raising=False)
    compat.set_allocator("expandable_segments:True")
    assert told == ["expandable_segments:True"]
