"""Newer flash attention in place of torch's own: `train.flash: fa3` or `fa4`.

Torch has flash attention of the second generation in itself. The third and fourth come in packages
(flash-attn-3 for Hopper, flash-attn's cute part for Hopper and Blackwell). One call of torch puts
them behind the operations that attention uses already, for rows, for packed documents and for
compiled layers alike, in the whole process: so they are there for as long as an engine has them,
and then torch's own again.

Whether this torch has the call, the package is there and the device takes the kernels, a call of
attention finds out, forward and backward, before anything is loaded. They are never chosen unasked:
torch calls its part of them a prototype, and no card has run them here.

Laws (tests/engine/compute/test_flash.py, with a stand-in)
    1. What torch, the packages or the device do not offer is refused by name, with a way out.
    2. The kernels are there while an engine holds them, and torch's own before and after, also
       where it fails.
    3. What packed documents know of the kernel is asked again after each change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.attention as attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatrain.devices.device import Device
from megatrain.errors import ConfigError
from megatrain.models.documents import kernel_runs

Flash = Literal["torch", "fa3", "fa4"]
_WIDTH = 64
"""Width of the heads that are tried."""


@contextmanager
def flash_kernels(wanted: Flash, device: Device) -> Iterator[None]:
    """Let attention on the device run on these kernels meanwhile. Raises ConfigError."""
    if wanted == "torch":
        yield
        return
    if not device.own_memory:
        raise _not_offered(wanted, f"compute is on {device.name}")
    _activate(wanted)
    kernel_runs.cache_clear()
    try:
        _require(wanted, device)
        yield
    finally:
        attention.restore_flash_attention_impl(_raise_warn=False)
        kernel_runs.cache_clear()


def _activate(wanted: str) -> None:
    activate: Callable[[str], None] | None = getattr(
        attention, "activate_flash_attention_impl", None
    )
    if activate is None:
        raise _not_offered(wanted, f"torch {torch.__version__} has no call for it")
    try:
        activate(wanted.upper())
    except (ImportError, RuntimeError, ValueError) as error:
        raise _not_offered(wanted, f"its package does not work here: {str(error)[:300]}") from error


def _require(wanted: str, device: Device) -> None:
    """Raise ConfigError unless the kernels take two tokens, forward and backward."""
    zeros = device.place(torch.zeros((1, 1, 2, _WIDTH), dtype=torch.bfloat16))
    given: Any = [zeros.clone().requires_grad_() for _ in range(3)]
    try:
        with torch.enable_grad(), sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            output = scaled_dot_product_attention(given[0], given[1], given[2], is_causal=True)
            torch.autograd.grad(output, given, torch.zeros_like(output))
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:  # NotImplementedError is one too
        raise _not_offered(wanted, f"{device.name} does not take it: {str(error)[:300]}") from error


def _not_offered(wanted: str, why: str) -> ConfigError:
    return ConfigError(
        f"train.flash is {wanted}, which is not offered: {why}. Set train.flash to torch."
    )
