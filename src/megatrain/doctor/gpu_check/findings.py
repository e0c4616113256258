"""Findings of a check, and the table of causes: what each fault means and what to try.

docs/gpu.md has the same table; docs/generate.py writes it.

Laws (tests/doctor/gpu_check/test_findings.py)
    1. Every cause of the table is found by some check, and says what to try.
    2. No path, name of a user or of a host leaves a finding.
"""

from __future__ import annotations

import getpass
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CheckState = Literal["ok", "slow", "wrong", "left out"]
CheckGroup = Literal["machine", "right", "fast"]
_PATH = re.compile(r"(?<![\w.])(?:/[\w.+@~-]+){2,}/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a check may fail."""

    seen: str
    """The finding, as the page of the docs lists it."""
    means: str
    tries: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check and its result."""

    group: CheckGroup
    name: str
    state: CheckState
    found: str
    """With figures, for people."""
    causes: tuple[str, ...] = ()
    """Keys of CAUSES: what it means and what to try."""
    exit_code: int = 0
    """The exit code of a failed check, as in errors.py."""


def judged(group: CheckGroup, name: str, found: str, causes: Sequence[str]) -> Check:
    """Return a check that is ok, or slow where there are causes."""
    state: CheckState = "slow" if causes else "ok"
    return Check(group=group, name=name, state=state, found=found, causes=tuple(causes))


CAUSES: dict[str, Cause] = {
    "cpu torch": Cause(
        seen="torch is built for the CPU",
        means="torch has no code for an accelerator, whatever driver there is",
        tries=("install the torch build for your device: pytorch.org/get-started",),
    ),
    "driver": Cause(
        seen="torch finds no accelerator",
        means="the driver is missing, or older than the CUDA or ROCm that torch is built for",
        tries=(
            "make `nvidia-smi` (or `rocminfo`) work, in the container too: `docker run --gpus all`",
            "update the driver, or install a torch build for an older CUDA",
            "look at CUDA_VISIBLE_DEVICES: an empty value hides all devices",
        ),
    ),
    "not driven": Cause(
        seen="torch's accelerator is of a type that the engine cannot drive",
        means="training runs on the CPU here: lanes need threads with a stream each, which Apple's "
        "MPS, for one, does not have",
        tries=("train with memory.device: auto, which is the CPU here",),
    ),
    "bits": Cause(
        seen="losses or gradients differ from the resident model's, and both repeat",
        means="a copy, a wait or a kernel is at fault: nothing trained here can be trusted",
        tries=(
            "send the page: this should not happen on any device",
            "run again with CUDA_LAUNCH_BLOCKING=1; if the bits are right then, a wait is missing",
            "test the memory: `dcgmi diag -r 2`, memtest; undo overclocking",
        ),
    ),
    "documents": Cause(
        seen="documents of a packed row differ from each document alone",
        means="attention by document is wrong here: a packed row lets documents see each other, "
        "or not enough of themselves",
        tries=(
            "train with data.packing: false until it is solved",
            "send the page, with the name of the device and the version of torch",
        ),
    ),
    "kernels": Cause(
        seen="the resident model does not repeat its own bits, or torch has no deterministic "
        "kernel",
        means="kernels of this device sum in a changing order: equality cannot be checked there",
        tries=(
            "set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the start, if something has unset it",
            "update torch; send the page, with the name of the device",
        ),
    ),
    "pinning": Cause(
        seen="host memory cannot be pinned",
        means="copies pass through small pinned buffers: correct, with one more pass over host "
        "memory",
        tries=(
            "in a container: `docker run --ulimit memlock=-1 --ipc=host`, and a larger memory "
            "limit of its control group",
            "on WSL2: pinned memory is limited to about half of the memory of the virtual "
            "machine; use Linux itself",
            "an IOMMU in strict mode: start the kernel with iommu=pt",
            "`ulimit -l unlimited`, where the driver respects memlock (ROCm, Intel)",
        ),
    ),
    "narrow link": Cause(
        seen="the link has fewer lanes, or a lower generation, than device and slot allow",
        means="copies cannot be faster than the link",
        tries=(
            "put the card into the slot next to the processor, without a riser",
            "set the slot to its generation (not to auto) in the firmware; look for `x4` slots of "
            "the chipset",
        ),
    ),
    "slow link": Cause(
        seen="copies reach less than 65 % of the link's rate",
        means="the link is shared, or the way to host memory is long",
        tries=(
            "stop what else uses the card, the disk or the same switch",
            "with several NUMA nodes: `numactl --cpunodebind=N --interleave=all`, N the node of "
            "the card",
            "an IOMMU in strict mode: start the kernel with iommu=pt",
        ),
    ),
    "one way": Cause(
        seen="copies in both directions at once take turns",
        means="weights and gradients share one rate: a step that is bound by the link is longer",
        tries=("look for a chipset or a virtual machine between card and processor",),
    ),
    "registration": Cause(
        seen="pinning is slower than 1 GB/s",
        means="starts take long: 14 bytes for each parameter go through it",
        tries=(
            "free and defragment host memory (`echo 1 > /proc/sys/vm/compact_memory`)",
            "set /sys/kernel/mm/transparent_hugepage/enabled to madvise or always",
        ),
    ),
    "slow products": Cause(
        seen="products reach less than 60 % of what this device sustains elsewhere",
        means="the device is throttled, or shared",
        tries=(
            "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER`: thermal or power limits",
            "stop other processes on the card; move the display to another one",
            "check that it is not the integrated GPU: --device cuda:1",
        ),
    ),
    "shared": Cause(
        seen="other processes use the device",
        means="memory and time go to them: figures are too low",
        tries=("stop them, and run the check again",),
    ),
    "busy host": Cause(
        seen="other programs keep the processor busy",
        means="updates and copies are measured too slow",
        tries=("run the check again when the machine is idle",),
    ),
    "no bf16": Cause(
        seen="the device has no bf16 units",
        means="products in bf16 are emulated, and slower than in fp32",
        tries=("train with model.dtype: fp32",),
    ),
    "waits": Cause(
        seen="the host waits for the device in a steady step",
        means="an op asks the device for a value, and its stream runs empty meanwhile",
        tries=("send the page: the text names the operation that waits",),
    ),
    "memory": Cause(
        seen="device memory is full",
        means="other processes hold it, or the device is small",
        tries=(
            "stop other processes on the card",
            "--params 300M, or less",
        ),
    ),
    "host memory": Cause(
        seen="host memory is too small",
        means="weights and optimizer states need 14 bytes for each parameter",
        tries=("--params 300M, or less", "raise the memory limit of the container"),
    ),
    "cap": Cause(
        seen="a cap of device memory is not kept, or not lifted",
        means="memory.vram cannot protect other users of the card",
        tries=("send the page, with the version of torch",),
    ),
    "far from bound": Cause(
        seen="the step takes more than 1.25 times its bound",
        means="lanes wait for each other, or the host issues work too slowly",
        tries=(
            "look at the timeline: what compute waits for is the bottleneck",
            "more tokens per step hide copies and updates",
            "send the page",
        ),
    ),
    "host paced": Cause(
        seen="the device waits for the host to issue work for over a fifth of the step",
        means="kernels are done sooner than they are issued; the bound has that time in it",
        tries=(
            "more tokens in a micro-batch (train.micro_batch_tokens), or fused kernels",
            "stop other programs on the processor; look at its clock and power settings",
        ),
    ),
    "unpredicted": Cause(
        seen="the step takes over 1.3 times its prediction",
        means="plans for this machine predict too short a time",
        tries=("send the page: predictions are corrected by such figures",),
    ),
    "stuck": Cause(
        seen="no lane makes progress",
        means="a driver or a kernel hangs",
        tries=("`dmesg` and `nvidia-smi` name Xid errors; send the text",),
    ),
    "error": Cause(
        seen="a check ends with another error",
        means="torch or the driver refused a call that the engine needs",
        tries=("send the page; CUDA_LAUNCH_BLOCKING=1 names the call",),
    ),
}


def anonymous(text: str) -> str:
    """Return `text` without paths, and without the names of this user and host."""
    text = _PATH.sub("(path)", text)
    for name, instead in ((platform.node(), "(host)"), (_user(), "(user)")):
        if len(name) > 2:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", instead, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # no such user: a container with a number alone
        return ""
