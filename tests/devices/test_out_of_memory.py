"""Law of is_out_of_memory: every error that means it is recognized, and no other."""

from __future__ import annotations

import pytest
import torch

from megatrain.devices.device import is_out_of_memory

MEANT = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("HIP error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"),
    RuntimeError(
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":'
        "1407, please report a bug to PyTorch. "
    ),
    RuntimeError(
        "NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "
        '"/pytorch/c10/cuda/CUDACachingAllocator.cpp":1377, please report a bug to PyTorch. '
    ),
)
OTHERS = (
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSetStream`"),
    RuntimeError('NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/PeerToPeerAccess.cpp":83'),
    RuntimeError("the caller ran out of memory of better days"),
    ValueError("CUDA error: out of memory"),
    MemoryError(),
)


@pytest.mark.parametrize("error", MEANT, ids=str)
def test_what_means_it_is_recognized(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_nothing_else_is(error: Exception) -> None:
    assert not is_out_of_memory(error)
