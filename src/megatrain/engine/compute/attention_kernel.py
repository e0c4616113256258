"""One attention kernel for forward and recompute, where attention draws random numbers.

Forward runs without gradients, the recompute of backward with them, and torch may choose another
kernel then: cuDNN has other plans, and flash attention refuses heads wider than 192 on some cards
when there are gradients. Without dropout that costs bits. With dropout the kernels draw other
masks, and gradients would be those of another forward. So kernels whose choice depends on gradients
are switched off for as long as a step lasts.

Law (tests/engine/compute/test_attention_kernel.py): a device computes forward and recompute of
attention with dropout under the same switches; the CPU, attention without dropout and whatever runs
between steps have torch's own.
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
_STEADY = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def kernel_switches(decoder: Decoder, device: Device) -> Callable[[], AbstractContextManager[None]]:
    """Return what to play a step under: the switches are torch's own, of all threads."""
    text = decoder.text_config
    if not device.own_memory or not any(getattr(text, name, 0) for name in _RATES):
        return nullcontext
    heads = getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    kernels = [SDPBackend.FLASH_ATTENTION, *_STEADY] if width <= _WIDEST_FLASH else _STEADY
    return lambda: sdpa_kernel(kernels)
