"""An accelerator without hardware, for torch.accelerator and all that is built on it: `hostgpu`.

    import testkit.host_gpu              # builds it once, a minute
    device = mt.accelerator("hostgpu")
    python -m testkit.host_gpu train run.yaml     # memory.device: hostgpu

torch sees a device of its own (PrivateUse1): megatrain's TorchRuntime, autograd's device threads
and torch's streams and events run on it as on CUDA. A stream is a thread that does the CPU's
kernels when it likes. The host that touches device memory dies, memory that was dropped is full of
NaN and handed out again, and an error of queued work is told later.

native/ is the device, one file for each part; library.py loads it; module.py is `torch.hostgpu`;
control.py is for tests. Where it is loaded, HOST_GPU_DEVICES (2) and HOST_GPU_MEMORY_MIB (4096, of
each) are read.

Laws
    1. What a program may rely on with CUDA it may rely on here, and no more.
    2. Without a wait that CUDA needs, some timing gives other bits, or an error.
    3. Computing gives the CPU's bits.
"""

from __future__ import annotations

import torch

from megatrain.config.value_types import ACCELERATOR_TYPES
from testkit.host_gpu import module
from testkit.host_gpu.library import DEVICE_TYPE

torch._register_device_module(DEVICE_TYPE, module)  # type: ignore[no-untyped-call]
ACCELERATOR_TYPES.add(DEVICE_TYPE)
