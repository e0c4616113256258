"""A CUDA device without a card: torch's own CUDA build, on a driver whose kernels do nothing.

    python -m testkit.null_cuda [--capability 9.0] [--mib 24564] [--devices 1] PROGRAM.py [WORD ...]
    python -m testkit.null_cuda -m MODULE [WORD ...]

A library of ours, loaded before all others, is CUDA's runtime, its driver, NVML, and as much of
cuBLAS, cuDNN and NCCL as torch calls. Each call succeeds at once and is counted, by the thread that
makes it and the device that is current there. All of torch that is above runs for real: its caching
allocator with segments that grow, its streams, events and dispatch, its choice of attention, Triton
and ptxas. Device memory is address space without access, so a host that reads it ends.

    environment.py   makes the environment with torch's CUDA build: minutes, once
    building.py      builds the library for that torch: seconds, once
    native/          the library: device.cpp, runtime.cpp, driver.cpp, and symbols.txt for the rest
    launching.py     starts a program of that environment on the device
    library.py       inside such a program: what was counted

Values mean nothing: losses are zero, and whatever a program reads of the device is zero. Orders and
races mean nothing either, because all is done when it is queued: for those there are
testkit/simulated and testkit/host_gpu.
"""
