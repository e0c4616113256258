"""Stand-ins for the two kernels of flash attention, so that its path can be tested on a CPU.

transformers decides which kernel to call and with which lengths. The stand-ins compute what the
kernels promise: the plain one causal attention within each row, the other within each document.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import PreTrainedModel, modeling_flash_attention_utils

Window = tuple[int, int]


class FlashKernels:
    """Both kernels; counts their calls."""

    def __init__(self) -> None:
        self.plain_calls = 0
        self.document_calls: list[list[int]] = []
        """Of each call with lengths: where its documents end."""

    def plain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:
        """Tensors are (rows, length, heads, width)."""
        self.plain_calls += 1
        rows = zip(q, k, v, strict=True)
        return torch.stack([_attend(*row, softmax_scale, window_size, softcap) for row in rows])

    def documents(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:
        """Tensors are (tokens, heads, width)."""
        assert cu_seqlens_q.dtype is torch.int32
        assert causal
        assert int(cu_seqlens_q.diff().max()) == int(max_seqlen_q) == int(max_seqlen_k)
        ends = cu_seqlens_q.tolist()
        assert (ends[0], ends[-1]) == (0, len(q))
        self.document_calls.append(ends)
        parts = [
            _attend(q[a:b], k[a:b], v[a:b], softmax_scale, window_size, softcap)
            for a, b in itertools.pairwise(ends)
        ]
        return torch.cat(parts)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: Window, softcap: float
) -> Tensor:
    """Return causal attention of one document. Tensors are (length, heads, width)."""
    q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(len(q) // len(k), dim=0) for tensor in (k, v))
    scores = q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    seen = (behind >= 0) & ((behind <= window[0]) if window[0] >= 0 else True)
    weights = F.softmax(scores.masked_fill(~seen, -math.inf), dim=-1)
    return (weights @ v).transpose(0, 1)


def use_flash_stand_ins(monkeypatch: pytest.MonkeyPatch) -> FlashKernels:
    """Let models be made with flash_attention_2 on this machine; return what they will call."""
    kernels, module = FlashKernels(), modeling_flash_attention_utils
    pads = (module._pad_input, module._unpad_input)

    def imports(*_: Any, **__: Any) -> tuple[Any, ...]:
        return kernels.plain, kernels.documents, None, *pads

    monkeypatch.setattr(module, "_lazy_imports", imports)
    monkeypatch.setattr(module, "_loaded_implementation", None)
    dispatch = lambda model, *_, **__: model._supports_flash_attn  # noqa: E731
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", dispatch)
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", _as_asked)
    module.lazy_import_flash_attention("flash_attention_2")
    return kernels


def _as_asked(model: PreTrainedModel, attention: str | None, *_: Any, **__: Any) -> str:
    if attention == "flash_attention_2" and not model._supports_flash_attn:
        raise ValueError(f"{type(model).__name__} does not support flash attention")
    return attention or "sdpa"
