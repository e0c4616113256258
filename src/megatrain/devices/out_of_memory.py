"""Out-of-memory, by the errors of torch, libraries and drivers.

torch's allocator raises torch.OutOfMemoryError. Libraries that allocate by themselves (cuBLAS and
cuDNN when they make a handle or a workspace), the driver, and the allocator of pinned host memory
fail with other errors, whose texts are known.

Law (tests/devices/test_out_of_memory.py): every such error is recognised, and no other.
"""

from __future__ import annotations

import re

import torch

_TEXTS = re.compile(
    r"CU\w+_STATUS_ALLOC_FAILED"  # cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT
    r"|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_NOT_INITIALIZED.*\w+Create"  # no room for a handle
    r"|CUDNN_STATUS_\w*(DEVICE|HOST)_ALLOCATION_FAILED"
    r"|\b[A-Z]+ (driver )?error: out of memory"
    r"|cudaErrorMemoryAllocation|hipErrorOutOfMemory|ROCBLAS_STATUS_MEMORY_ERROR"
    r"|UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)",
    re.DOTALL,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether device memory, or host memory that devices reach, has run out."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None
