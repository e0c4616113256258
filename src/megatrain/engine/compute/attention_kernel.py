"""Which of torch's attention kernels a step may use: the same for forward and recompute.

Two kinds of kernels are switched off for as long as a step lasts:

    cuDNN          makes a plan for each new shape, in the lane, in 0.1 to 1 s (reported, not
                   measured here). torch prefers it for rows that are not packed on cards of compute
                   capability 9.0 and 10.0, and rows that are not packed change their length. Which
                   lengths a process has met must not decide either: a resumed run would have other
                   bits
    flash, wide    where attention draws random numbers: flash attention refuses heads wider than
                   192 on some cards when there are gradients. Forward runs without, the recompute
                   of backward with them, and two kernels draw two masks: gradients would be those
                   of another forward

Packed rows are not concerned: models/documents.py calls flash attention for all documents at once.

Law (tests/engine/compute/test_attention_kernel.py): a device computes forward and recompute of
attention under the same switches; the CPU and whatever runs between steps have torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain.devices.device import Device
from megatrain.models.decoder import Decoder

_RATES = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
"""Names of attention's dropout in configs of transformers."""
_WIDEST_FLASH = 192
_STEADY = [
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.OVERRIDEABLE,  # how devices that are not CUDA bring their own
    SDPBackend.MATH,
]


def kernel_switches(decoder: Decoder, device: Device) -> Callable[[], AbstractContextManager[None]]:
    """Return what to play a step under: the switches are torch's own, of all threads."""
    if not device.own_memory:
        return nullcontext
    text = decoder.text_config
    draws = any(getattr(text, name, 0) for name in _RATES)
    heads = getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    kernels = _STEADY if draws and width > _WIDEST_FLASH else [SDPBackend.FLASH_ATTENTION, *_STEADY]
    return lambda: sdpa_kernel(kernels)
